// Tokens and log-probabilities from rows of logits, with the arithmetic of the CPU (src/cpu/logits.rs): the same
// polynomial, the same trees of sums over the same blocks of the vocabulary. The build fuses no product with an addition
// that is not written as `fmaf`.

#include <math_constants.h>
#include <stdint.h>

constexpr int VOCAB_BLOCK = 128;

// `e^x` with the bits of the CPU's.
__device__ __forceinline__ float exp_cpu(float x) {
    const float round = 12582912.0f;  // adding it rounds to the nearest integer
    float r = -87.3f > x ? -87.3f : x;
    r = 88.376f < r ? 88.376f : r;
    const float shifted = fmaf(r, 1.44269504088896340736f, round);
    const float n = shifted - round;
    r = fmaf(n, -0.6933594f, r);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.9875692e-4f;
    p = fmaf(p, r, 1.3982e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    const float y = fmaf(p, r * r, r) + 1.0f;
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + (127u << 23));
    return x < -87.3f ? 0.0f : y * power;
}

// The weight of a logit, relative to that of `max`.
__device__ __forceinline__ float weight(float x, float max, float scale) {
    return exp_cpu((x - max) * scale);
}

// The sum of a tree that adds the second half to the first until one value is left.
template <typename T, int N>
__device__ __forceinline__ T tree_sum(const T (&values)[N]) {
    if constexpr (N == 1) {
        return values[0];
    } else {
        T half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) half[i] = values[i] + values[i + N / 2];
        return tree_sum(half);
    }
}

// Sums are relative to a finite maximum: -inf - -inf would be NaN.
__device__ __forceinline__ float reference(float max) { return fmaxf(max, -CUDART_MAX_NORMAL_F); }

// A row whose tasks are answered here. It has the weights of its first scale, which is 1, and of those of its tasks.
struct Row {
    int row, first_scale, scales;
};

// Threads of one block of the vocabulary, and the values of each: those of lane `l` are `l`, `l + LANES` and so on.
constexpr int LANES = 8;
constexpr int VALUES = VOCAB_BLOCK / LANES;
constexpr int SUMMARISE_THREADS = 256;

// The maximum of each block of the vocabulary, and for each scale the block's sum of weights relative to it. Maxima
// ignore NaN; NaN and +inf make sums NaN.
extern "C" __global__ void __launch_bounds__(SUMMARISE_THREADS)
    summarise_logits(float* maxima, float* sums, const float* logits, int64_t stride, int vocab, const Row* rows,
                     const float* scales) {
    const Row row = rows[blockIdx.y];
    const int lane = threadIdx.x % LANES, blocks = (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    const int block = blockIdx.x * (SUMMARISE_THREADS / LANES) + threadIdx.x / LANES;
    const float* from = logits + row.row * stride;
    float x[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int64_t token = static_cast<int64_t>(block) * VOCAB_BLOCK + i * LANES + lane;
        x[i] = token < vocab ? from[token] : -CUDART_INF_F;
    }
    float max = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) max = x[i] > max ? x[i] : max;
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, half));
    const bool writes = lane == 0 && block < blocks;
    if (writes) maxima[static_cast<int64_t>(blockIdx.y) * blocks + block] = max;
    for (int s = row.first_scale; s < row.first_scale + row.scales; ++s) {
        float weights[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) weights[i] = weight(x[i], reference(max), scales[s]);
        float sum = tree_sum(weights);
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
        if (writes) sums[static_cast<int64_t>(s) * blocks + block] = sum;
    }
}

constexpr uint32_t NO_TARGET = ~0u;

// One question to a row; src/sampling.rs has its terms.
struct Task {
    int row;    // index in the rows
    int scale;  // index in the scales
    uint32_t target;
    int is_greedy;
    uint32_t top_k;
    uint32_t is_filtered;
    double top_p;
    double min_p;  // how far below the maximum logits are kept, negative or -inf
    double uniform;
};

struct Answer {
    uint32_t token;
    uint32_t choice;  // the token that greedy takes, where it is asked for or nothing else can be taken
    uint32_t is_kept;
    float logit;  // of the token
    float max;
    uint32_t unused;
    double raw_total;  // sum of the weights of all tokens at scale 1; NaN if the row has NaN or +inf
    double total;      // sum of the weights that are kept at the task's scale
};

// The last token that is kept, in the order of descending logits, ties by ascending id.
struct Bound {
    float logit;
    uint32_t id;

    __device__ __forceinline__ bool keeps(float x, uint32_t token) const {
        return x > logit || (x == logit && token <= id);
    }
};

// Integers in the order of float32 values; equal for both zeros.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & ~(1u << 31) : ~key);
}

constexpr int THREADS = 256;
// Lanes in which the sums of blocks are added, and threads of the second stage of a reduction.
constexpr int TOTALS = 16;

struct Sum {
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
};

struct Max {
    static __device__ __forceinline__ double of(double a, double b) { return a > b ? a : b; }
};

struct Shared {
    double values[THREADS];
    double partial[2][TOTALS];
    double running;
    float weights[VOCAB_BLOCK];
    int block;
};

// A task's row, as the threads of its block work on it together.
struct Work {
    const float* logits;
    int vocab, blocks;
    float max;
    // Of the blocks of the vocabulary, in shared memory.
    float *maxima, *sums;
    Shared* shared;
    int parity;

    // `values` combined in one order by all threads. Each reduction has a barrier between two uses of the same memory.
    template <typename Operation>
    __device__ __forceinline__ double reduce(double value) {
        shared->values[threadIdx.x] = value;
        __syncthreads();
        double* partial = shared->partial[parity];
        parity ^= 1;
        if (threadIdx.x < TOTALS) {
            double all = shared->values[threadIdx.x];
#pragma unroll
            for (int i = 1; i < THREADS / TOTALS; ++i) {
                all = Operation::of(all, shared->values[threadIdx.x + i * TOTALS]);
            }
            partial[threadIdx.x] = all;
        }
        __syncthreads();
        double all = partial[0];
#pragma unroll
        for (int i = 1; i < TOTALS; ++i) all = Operation::of(all, partial[i]);
        return all;
    }

    __device__ __forceinline__ void load_maxima(const float* from) {
        double largest = -CUDART_INF;
        for (int b = threadIdx.x; b < blocks; b += THREADS) {
            maxima[b] = from[b];
            largest = Max::of(from[b], largest);
        }
        max = static_cast<float>(reduce<Max>(largest));
    }

    __device__ __forceinline__ void load_sums(const float* from) {
        for (int b = threadIdx.x; b < blocks; b += THREADS) sums[b] = from[b];
    }

    // Makes the sums of blocks relative to the row's maximum, and returns their total. A thread has loaded those that
    // it scales, and may load others when this returns.
    __device__ __forceinline__ double add_blocks(float scale) {
        for (int b = threadIdx.x; b < blocks; b += THREADS) {
            sums[b] *= weight(maxima[b], reference(max), scale);
        }
        __syncthreads();
        double* totals = shared->partial[parity];
        parity ^= 1;
        if (threadIdx.x < TOTALS) {
            double total = 0.0;
            for (int b = threadIdx.x; b < blocks; b += TOTALS) total += sums[b];
            totals[threadIdx.x] = total;
        }
        __syncthreads();
        return tree_sum(shared->partial[parity ^ 1]);
    }

    // The token with the highest logit, the lowest of those; 0 if all are -inf.
    __device__ __forceinline__ uint32_t argmax() {
        if (max == -CUDART_INF_F) return 0;
        double first = -CUDART_INF;
        for (int b = threadIdx.x; b < blocks; b += THREADS) {
            if (maxima[b] == max) first = Max::of(first, -b);
        }
        const int start = static_cast<int>(-reduce<Max>(first)) * VOCAB_BLOCK, token = start + threadIdx.x;
        const bool is_max = threadIdx.x < VOCAB_BLOCK && token < vocab && logits[token] == max;
        return static_cast<uint32_t>(-reduce<Max>(is_max ? -token : -CUDART_INF));
    }

    // Calls `work` with each block of the vocabulary that has a logit of at least `floor`, by all threads of one warp.
    template <typename F>
    __device__ __forceinline__ void each_block(float floor, F work) const {
        for (int first = threadIdx.x / 32 * 32; first < blocks; first += THREADS) {
            const int mine = first + threadIdx.x % 32;
            uint32_t found = __ballot_sync(~0u, mine < blocks && maxima[mine] >= floor);
            for (; found; found &= found - 1) work(first + __ffs(found) - 1);
        }
    }

    // Whether the tokens that `bound` keeps reach `target`: their number, or their weight at `scale`.
    template <bool IS_COUNT>
    __device__ __forceinline__ bool reaches(double target, float scale, Bound bound) {
        double sum = 0.0;
        each_block(bound.logit, [&](int block) {
#pragma unroll
            for (int i = 0; i < VOCAB_BLOCK; i += 32) {
                const int token = block * VOCAB_BLOCK + i + threadIdx.x % 32;
                const float x = token < vocab ? logits[token] : CUDART_NAN_F;
                if (bound.keeps(x, token)) sum += IS_COUNT ? 1.0 : weight(x, max, scale);
            }
        });
        return reduce<Sum>(sum) >= target;
    }

    // Positions in the order of tokens: higher ones come first.
    __device__ __forceinline__ uint64_t position(float x, uint32_t token) const {
        return static_cast<uint64_t>(key_of(x)) * vocab + (vocab - 1 - token);
    }

    // The last token of the shortest prefix that reaches `target`, or the bound that keeps all. Bisects the order, at
    // first in growing steps from the maximum down, so that few blocks of the vocabulary are read.
    template <bool IS_COUNT>
    __device__ __forceinline__ Bound prefix(double target, float scale) {
        uint64_t low = position(-CUDART_INF_F, vocab - 1), high = position(max, 0);
        float depth = 2.0f / scale;
        while (low < high) {
            const uint64_t step = min(high, position(max - depth, vocab - 1));
            const uint64_t middle = ::max(step, low + (high - low + 1) / 2);
            depth *= 4.0f;
            if (reaches<IS_COUNT>(target, scale, bound_at(middle))) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return bound_at(low);
    }

    __device__ __forceinline__ Bound bound_at(uint64_t position) const {
        const uint32_t token = vocab - 1 - static_cast<uint32_t>(position % vocab);
        return {value_of(static_cast<uint32_t>(position / vocab)), token};
    }

    // Fills the sums of blocks with the weights of what `bound` keeps, and returns their total.
    __device__ __forceinline__ double sum_kept(float scale, Bound bound) {
        for (int b = threadIdx.x; b < blocks; b += THREADS) sums[b] = 0.0f;
        __syncthreads();
        each_block(bound.logit, [&](int block) {
            const int lane = threadIdx.x % 32;
            float kept[VOCAB_BLOCK / 32];
#pragma unroll
            for (int i = 0; i < VOCAB_BLOCK / 32; ++i) {
                const int token = block * VOCAB_BLOCK + i * 32 + lane;
                const float x = token < vocab ? logits[token] : -CUDART_INF_F;
                kept[i] = bound.keeps(x, token) ? weight(x, reference(maxima[block]), scale) : 0.0f;
            }
            float sum = tree_sum(kept);
#pragma unroll
            for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
            if (lane == 0) sums[block] = sum;
        });
        __syncthreads();
        return add_blocks(scale);
    }

    // The last token that passes the task's filters. `total` is the sum of the weights of all tokens.
    __device__ __forceinline__ Bound filter(const Task& task, float scale, double total) {
        Bound bound = {-CUDART_INF_F, ~0u};
        if (task.min_p > -CUDART_INF) bound.logit = static_cast<float>(max + task.min_p);
        const bool keeps_all = bound.logit == -CUDART_INF_F;
        if (task.top_k > 0) bound = tighter(bound, prefix<true>(task.top_k, 1.0f));
        if (task.top_p < 1.0) {
            if (task.top_k > 0 || !keeps_all) total = sum_kept(scale, bound);
            bound = tighter(bound, prefix<false>(task.top_p * total, scale));
        }
        return bound;
    }

    // The bound that keeps fewer tokens.
    static __device__ __forceinline__ Bound tighter(Bound a, Bound b) { return a.keeps(b.logit, b.id) ? b : a; }

    // Leaves in shared memory the block of the vocabulary in which the running sum exceeds `target`, or the last that
    // has any weight, and the sum before it. One thread adds all sums in their order, as the CPU does: many of them
    // between two comparisons, each of which would wait for the addition before it.
    __device__ __forceinline__ void find_block(double target) {
        constexpr int AT_ONCE = 16;
        double running = 0.0, before = 0.0;
        int first = 0;
        for (int b = 0; b < blocks && running <= target; b += AT_ONCE) {
            double next = running;
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float sum = b + i < blocks ? sums[b + i] : 0.0f;
                largest = fmaxf(largest, sum);
                next += sum;
            }
            if (largest > 0.0f) {
                first = b;
                before = running;
            }
            running = next;
        }
        for (int b = first; b < min(first + AT_ONCE, blocks) && before <= target; ++b) {
            if (sums[b] > 0.0f) {
                shared->block = b;
                shared->running = before;
            }
            before += sums[b];
        }
    }

    // The first token at which the running sum of what is kept exceeds `target`. The sums of blocks are those of
    // `bound`, with a positive total.
    __device__ __forceinline__ uint32_t inverse_cdf(float scale, Bound bound, double target) {
        if (threadIdx.x == 0) find_block(target);
        __syncthreads();
        const int start = shared->block * VOCAB_BLOCK, mine = start + threadIdx.x;
        if (threadIdx.x < VOCAB_BLOCK) {
            const float x = mine < vocab ? logits[mine] : -CUDART_INF_F;
            shared->weights[threadIdx.x] = bound.keeps(x, mine) ? weight(x, max, scale) : 0.0f;
        }
        __syncthreads();
        int choice = 0;
        double running = shared->running;
        for (int i = 0; i < VOCAB_BLOCK && running <= target; ++i) {
            const float mine = shared->weights[i];
            if (mine > 0.0f) {
                choice = i;
                running += mine;
            }
        }
        return start + choice;
    }
};

// Answers one task with each block. Shared memory has two float32 values for each block of the vocabulary.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    answer_tasks(Answer* answers, const Task* tasks, const Row* rows, const float* scales, const float* maxima,
                 const float* sums, const float* logits, int64_t stride, int vocab) {
    __shared__ Shared shared;
    extern __shared__ float of_blocks[];
    const Task task = tasks[blockIdx.x];
    const Row row = rows[task.row];
    const int blocks = (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    const int64_t wide = blocks;
    Work work = {logits + row.row * stride, vocab, blocks, 0.0f, of_blocks, of_blocks + blocks, &shared, 0};
    work.load_maxima(maxima + task.row * wide);
    work.load_sums(sums + row.first_scale * wide);
    Answer found = {};
    found.max = work.max;
    found.raw_total = work.add_blocks(1.0f);
    if (task.is_greedy || isnan(found.raw_total) || isinf(work.max)) {
        found.choice = work.argmax();
        found.token = task.target == NO_TARGET ? found.choice : task.target;
    } else {
        const float scale = scales[task.scale];
        found.total = found.raw_total;
        if (task.scale != row.first_scale) {
            work.load_sums(sums + task.scale * wide);
            found.total = work.add_blocks(scale);
        }
        Bound bound = {-CUDART_INF_F, ~0u};
        if (task.is_filtered) {
            bound = work.filter(task, scale, found.total);
            found.total = work.sum_kept(scale, bound);
        }
        found.token = task.target;
        if (task.target == NO_TARGET) {
            found.token = work.inverse_cdf(scale, bound, task.uniform * found.total);
        }
        found.is_kept = bound.keeps(work.logits[found.token], found.token);
    }
    found.logit = work.logits[found.token];
    if (threadIdx.x == 0) answers[blockIdx.x] = found;
}

// Up to this |d| the series of `src/cpu/logits/divergence.rs` has the precision of float32.
constexpr float NEAR = 0.5f;

// The terms of a token in KL(policy || reference) and in KL(reference || policy). `p` and `q` are its probabilities, and
// `d` is the logarithm of their ratio.
__device__ __forceinline__ float2 divergence_terms(float p, float q, float d) {
    if (d > NEAR || d < -NEAR) return {fmaf(p, d, q - p), fmaf(q, -d, p - q)};
    const float square = d * d;
    float even = fmaf(1.0f / 40320.0f, square, 1.0f / 720.0f), odd = fmaf(1.0f / 362880.0f, square, 1.0f / 5040.0f);
    even = fmaf(fmaf(even, square, 1.0f / 24.0f), square, 0.5f);
    odd = fmaf(fmaf(odd, square, 1.0f / 120.0f), square, 1.0f / 6.0f);
    return {p * fmaf(-d, odd, even) * square, q * fmaf(d, odd, even) * square};
}

// Both divergences of a pair of rows with each block of threads. `rows` has the policy's and then the reference's row of
// each pair, each with one scale. Shared memory has two float32 values for each block of the vocabulary.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    divergences(double2* answers, const Row* rows, const float* scales, const float* maxima, const float* sums,
                const float* logits, int64_t stride, int vocab) {
    __shared__ Shared shared;
    extern __shared__ float of_blocks[];
    const int blocks = (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, first = 2 * blockIdx.x;
    const float scale = scales[rows[first].first_scale];
    const float* from[2];
    float max[2], inverse[2];
    double log_total[2];
    for (int side = 0; side < 2; ++side) {
        const Row row = rows[first + side];
        from[side] = logits + row.row * stride;
        Work work = {from[side], vocab, blocks, 0.0f, of_blocks, of_blocks + blocks, &shared, 0};
        work.load_maxima(maxima + static_cast<int64_t>(first + side) * blocks);
        work.load_sums(sums + static_cast<int64_t>(row.first_scale) * blocks);
        const double total = work.add_blocks(scale);
        max[side] = work.max;
        inverse[side] = static_cast<float>(1.0 / total);
        log_total[side] = log(total);
        __syncthreads();  // the next row's maxima and sums take the same memory
    }
    const float log_ratio = static_cast<float>(log_total[1] - log_total[0]);
    float *forward = of_blocks, *reverse = of_blocks + blocks;
    const int lane = threadIdx.x % LANES;
    for (int start = 0; start < blocks; start += THREADS / LANES) {
        const int block = start + threadIdx.x / LANES;
        float terms[2][VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int64_t token = static_cast<int64_t>(block) * VOCAB_BLOCK + i * LANES + lane;
            float2 term = {0.0f, 0.0f};
            if (token < vocab) {
                const float p = (from[0][token] - max[0]) * scale, q = (from[1][token] - max[1]) * scale;
                term = divergence_terms(exp_cpu(p) * inverse[0], exp_cpu(q) * inverse[1], p - q + log_ratio);
            }
            terms[0][i] = term.x;
            terms[1][i] = term.y;
        }
        float sum[2] = {tree_sum(terms[0]), tree_sum(terms[1])};
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], half);
            sum[1] += __shfl_xor_sync(~0u, sum[1], half);
        }
        if (lane == 0 && block < blocks) {
            forward[block] = sum[0];
            reverse[block] = sum[1];
        }
    }
    __syncthreads();
    double(&totals)[2][TOTALS] = shared.partial;
    if (threadIdx.x < 2 * TOTALS) {
        const int side = threadIdx.x / TOTALS, own = threadIdx.x % TOTALS;
        double total = 0.0;
        for (int b = own; b < blocks; b += TOTALS) total += (side == 0 ? forward : reverse)[b];
        totals[side][own] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) answers[blockIdx.x] = {tree_sum(totals[0]), tree_sum(totals[1])};
}
