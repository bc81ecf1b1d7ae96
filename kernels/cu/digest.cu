// XXH3-128 (seed 0, the default secret) of ranges of memory, and the first value of each that is not finite.
//
// Eight accumulators take a stripe of 64 bytes at a time, a word each, and are scrambled after 16 stripes: a round. What
// a round adds does not depend on what was added before. So eight threads sum a round, all rounds of a chunk at once,
// while a warp adds and scrambles what the chunk before has summed: eight chains, which nothing can shorten.

#include <stdint.h>

constexpr int LANES = 8;
constexpr int STRIPE_BYTES = LANES * sizeof(uint64_t);
constexpr int STRIPES = 16;
constexpr int ROUND_BYTES = STRIPES * STRIPE_BYTES;
// Rounds of a chunk, and the threads that sum them. The warp behind them has the accumulators.
constexpr int ROUNDS = 32;
constexpr int SUMMING = ROUNDS * LANES;
constexpr int THREADS = SUMMING + 32;
constexpr unsigned ALL = 0xffffffff;

constexpr uint64_t PRIME32_1 = 0x9e3779b1, PRIME64_1 = 0x9e3779b185ebca87, PRIME64_2 = 0xc2b2ae3d27d4eb4f,
                   PRIME_MX1 = 0x165667919e3779f9;

// The host gives the secret and, behind it, what the accumulators begin with: a module with constants of its own would
// take memory of the device for as long as it is loaded.
constexpr int SECRET_WORDS = 24, CONSTANTS = SECRET_WORDS + LANES;
// Where the secrets of the last stripe and of the two halves of the digest begin, in bytes.
constexpr int LAST_SECRET = 121, LOW_SECRET = 11, HIGH_SECRET = 117;

// Values that lie anywhere, and are more than 240 bytes.
struct Range {
    const uint8_t* start;
    uint64_t bytes;
    // The bits of a value's exponent, in each value of a word. Where all of them are set a value is not finite.
    uint64_t exponents;
    // Of the bytes of a value: 1 or 2.
    uint64_t log2_value_bytes;
};

struct Answer {
    uint64_t low, high;
    // Index of the first value that is not finite, or all bits set.
    uint64_t not_finite;
};

// The eight bytes from `at` on, which is a multiple of the size of a `Part`. They are not read again.
template <typename Part>
__device__ __forceinline__ uint64_t load(const uint8_t* at) {
    uint64_t word = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(uint64_t) / sizeof(Part)); ++i) {
        word |= static_cast<uint64_t>(__ldcs(reinterpret_cast<const Part*>(at) + i)) << (8 * sizeof(Part) * i);
    }
    return word;
}

// The eight bytes of the secret from byte `at` on, which is no multiple of eight.
__device__ __forceinline__ uint64_t secret_at(const uint64_t* secret, int at) {
    const int bits = at % 8 * 8;
    return secret[at / 8] >> bits | secret[at / 8 + 1] << (64 - bits);
}

// What stripes add to the accumulator of a lane.
struct Sum {
    uint64_t products = 0, words = 0;

    __device__ __forceinline__ void add(uint64_t word, uint64_t secret) {
        const uint64_t keyed = word ^ secret;
        products += (keyed & 0xffffffff) * (keyed >> 32);
        words += word;
    }

    // The words go to the neighbour. All threads of the warp call it.
    __device__ __forceinline__ uint64_t total() const {
        return products + __shfl_xor_sync(ALL, words, 1);
    }
};

__device__ __forceinline__ uint64_t scrambled(uint64_t accumulator, uint64_t secret) {
    return (accumulator ^ accumulator >> 47 ^ secret) * PRIME32_1;
}

// Half of the digest. All threads of the warp call it.
__device__ __forceinline__ uint64_t merged(uint64_t accumulator, uint64_t secret, uint64_t start) {
    const uint64_t a = accumulator ^ secret, b = __shfl_xor_sync(ALL, a, 1);
    uint64_t sum = a * b ^ __umul64hi(a, b);
    sum += __shfl_xor_sync(ALL, sum, 2);
    sum += __shfl_xor_sync(ALL, sum, 4);
    sum += start;
    sum = (sum ^ sum >> 37) * PRIME_MX1;
    return sum ^ sum >> 32;
}

// Where values of a word are not finite: the highest bit of each of those.
__device__ __forceinline__ uint64_t not_finite(uint64_t word, const Range& range) {
    const uint64_t highest = range.log2_value_bytes == 1 ? 0x8000800080008000 : 0x8000000080000000;
    // A value whose exponent has all bits is the only one that becomes zero here, and the only one that an addition of
    // all bits but the highest leaves below that.
    const uint64_t exponents = word & range.exponents ^ range.exponents;
    return ~(exponents + ~highest) & highest;
}

// Lowers `first` to the index of the first value that is not finite of a word `offset` bytes behind the start.
__device__ __forceinline__ void look(uint64_t word, uint64_t offset, const Range& range, uint64_t& first) {
    const uint64_t found = not_finite(word, range);
    if (found == 0) return;
    const uint64_t byte = offset + (__ffsll(static_cast<long long>(found)) - 1) / 8;
    first = min(first, byte >> range.log2_value_bytes);
}

// The words of a round that a lane adds; zeros if there is none.
template <typename Part>
__device__ __forceinline__ void load_round(uint64_t (&words)[STRIPES], const Range& range, uint64_t round,
                                           uint64_t rounds, int lane) {
    const uint8_t* at = range.start + round * ROUND_BYTES + lane * sizeof(uint64_t);
#pragma unroll
    for (int i = 0; i < STRIPES; ++i) words[i] = round < rounds ? load<Part>(at + i * STRIPE_BYTES) : 0;
}

// A range whose start is a multiple of the size of a `Part`, by a block.
template <typename Part>
__device__ __forceinline__ void digest(const Range& range, const uint64_t* secret, uint64_t (*sums)[ROUNDS][LANES],
                                       unsigned long long* first_of_all, Answer* answer) {
    const int lane = threadIdx.x % LANES, place = threadIdx.x / LANES;
    // The last stripes are of no round, also where they would fill one: nothing is scrambled behind them.
    const uint64_t rounds = (range.bytes - 1) / ROUND_BYTES, chunks = (rounds + ROUNDS - 1) / ROUNDS;
    uint64_t accumulator = secret[SECRET_WORDS + lane], first = ~0ull;
    // The words of the next chunk are on their way while those of this one are summed.
    uint64_t words[STRIPES], next[STRIPES];
    if (place < ROUNDS) load_round<Part>(next, range, place, rounds, lane);
    for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
        if (place < ROUNDS) {
            const uint64_t round = chunk * ROUNDS + place;
#pragma unroll
            for (int i = 0; i < STRIPES; ++i) words[i] = next[i];
            load_round<Part>(next, range, round + ROUNDS, rounds, lane);
            Sum sum;
            uint64_t found = 0;
#pragma unroll
            for (int i = 0; i < STRIPES; ++i) {
                sum.add(words[i], secret[i + lane]);
                found |= not_finite(words[i], range);
            }
            if (found != 0) {
                for (int i = 0; i < STRIPES; ++i) {
                    look(words[i], round * ROUND_BYTES + i * STRIPE_BYTES + lane * sizeof(uint64_t), range, first);
                }
            }
            sums[chunk % 2][place][lane] = sum.total();
        } else if (chunk > 0) {
            const uint64_t done = (chunk - 1) * ROUNDS;
            const int count = static_cast<int>(min(rounds - done, static_cast<uint64_t>(ROUNDS)));
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                accumulator = scrambled(accumulator + sums[(chunk - 1) % 2][i][lane], secret[STRIPES + lane]);
            }
        }
        __syncthreads();
    }
    if (place >= ROUNDS) {
        Sum sum;
        uint64_t offset = rounds * ROUND_BYTES + lane * sizeof(uint64_t);
        const int stripes = static_cast<int>((range.bytes - 1) % ROUND_BYTES / STRIPE_BYTES);
        for (int i = 0; i < stripes; ++i, offset += STRIPE_BYTES) {
            const uint64_t word = load<Part>(range.start + offset);
            sum.add(word, secret[i + lane]);
            look(word, offset, range, first);
        }
        // The last stripe ends with the range, and begins at any address.
        offset = range.bytes - STRIPE_BYTES + lane * sizeof(uint64_t);
        const uint64_t word = load<uint8_t>(range.start + offset);
        sum.add(word, secret_at(secret, LAST_SECRET + lane * 8));
        look(word, offset, range, first);
        accumulator += sum.total();
    }
    if (first != ~0ull) atomicMin(first_of_all, static_cast<unsigned long long>(first));
    __syncthreads();
    if (place >= ROUNDS) {
        const uint64_t bytes = range.bytes;
        const uint64_t low = merged(accumulator, secret_at(secret, LOW_SECRET + lane * 8), bytes * PRIME64_1);
        const uint64_t high = merged(accumulator, secret_at(secret, HIGH_SECRET + lane * 8), ~(bytes * PRIME64_2));
        if (threadIdx.x == SUMMING) *answer = {low, high, *first_of_all};
    }
}

// A block for each range.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    digest(const uint64_t* constants, const Range* ranges, Answer* answers) {
    __shared__ uint64_t secret[CONSTANTS];
    __shared__ uint64_t sums[2][ROUNDS][LANES];
    __shared__ unsigned long long first;
    if (threadIdx.x < CONSTANTS) secret[threadIdx.x] = constants[threadIdx.x];
    if (threadIdx.x == 0) first = ~0ull;
    __syncthreads();
    const Range range = ranges[blockIdx.x];
    Answer* answer = answers + blockIdx.x;
    const uintptr_t start = reinterpret_cast<uintptr_t>(range.start);
    if (start % 8 == 0) {
        digest<uint64_t>(range, secret, sums, &first, answer);
    } else if (start % 4 == 0) {
        digest<uint32_t>(range, secret, sums, &first, answer);
    } else if (start % 2 == 0) {
        digest<uint16_t>(range, secret, sums, &first, answer);
    } else {
        digest<uint8_t>(range, secret, sums, &first, answer);
    }
}
