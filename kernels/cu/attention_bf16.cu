// Paged attention over bfloat16 keys and values, by tensor cores: queries and weights are rounded to bfloat16, sums are
// float32. Each warp has 16 queries, whose rows of an instruction do not touch each other; a block's warps share the
// keys and values that it copies to shared memory.

#include "attention.cuh"
#include "ptx.cuh"

// `HEAD_DIM` is the largest dimension, to which smaller ones are filled up with zeros.
template <int HEAD_DIM, int WARPS, int STAGES>
struct TensorCores {
    static constexpr int THREADS = 32 * WARPS, QUERIES = 16 * WARPS;
    // Values from a row in shared memory to the next: 8 rows of a matrix are in different banks.
    static constexpr int STRIDE = HEAD_DIM + 8;
    // Values of a stage: keys and values of a unit.
    static constexpr int STAGE = 2 * UNIT * STRIDE;
    // Values of one asynchronous copy, how many a row has, and how many of them a thread starts for a stage.
    static constexpr int CHUNK = 8, CHUNKS = HEAD_DIM / CHUNK, COPIES = 2 * UNIT * CHUNKS / THREADS;
    // Products of 16 dimensions, of 8 positions and of 8 dimensions.
    static constexpr int STEPS = HEAD_DIM / 16, KEYS = UNIT / 8, DIMS = HEAD_DIM / 8;
    static_assert(THREADS % CHUNKS == 0, "a thread copies the same chunk of each row");

    // Copies units from global to shared memory.
    struct Loader {
        const Attention& a;
        const Work<QUERIES>& work;
        uint32_t stages;
        int (&slots)[2][UNIT];

        __device__ __forceinline__ uint32_t stage(int unit) const {
            return stages + unit % STAGES * STAGE * sizeof(bf16);
        }

        // Slot of the position of a unit that this thread looks up, if it does.
        __device__ __forceinline__ int look_up(int unit) const {
            return threadIdx.x < UNIT ? work.slot(a, unit * UNIT + threadIdx.x) : -1;
        }

        __device__ __forceinline__ void keep(int unit, int slot) const {
            if (threadIdx.x < UNIT) slots[unit % 2][threadIdx.x] = slot;
        }

        // Starts to copy a unit whose slots are kept; zeros for positions that no query sees, whose slots may hold
        // anything. No positions are seen after the last unit.
        __device__ __forceinline__ void copy(int unit) const {
            const int chunk = threadIdx.x % CHUNKS;
            if (unit * UNIT < work.high) {
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    const int row = (threadIdx.x + i * THREADS) / CHUNKS;
                    const int slot = slots[unit % 2][row % UNIT];
                    const bool valid = slot >= 0 && chunk * CHUNK < a.head_dim;
                    const bf16* from = static_cast<const bf16*>(row < UNIT ? a.keys : a.values);
                    if (valid) from += static_cast<int64_t>(slot) * a.head_dim + chunk * CHUNK;
                    copy_async_16(stage(unit) + (row * STRIDE + chunk * CHUNK) * sizeof(bf16), from, valid);
                }
            }
            commit_copies();
        }
    };

    // Two values as bfloat16, the first in the low half.
    static __device__ __forceinline__ uint32_t pair(float x, float y) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        return *reinterpret_cast<const uint32_t*>(&both);
    }

    // What a thread has of its warp's 16 queries: two of them, `lane / 4` and 8 on.
    struct Queries {
        // Of the sequence.
        int first, numbers[2];
        // Positions that each sees, that any of the warp, and that all of it see; none of queries that do not exist.
        int low[2], high[2];
        int any_low, any_high, all_low, all_high;
        uint32_t values[STEPS][4];

        __device__ __forceinline__ Queries(const Attention& a, const Work<QUERIES>& work)
            : first(work.first_query + static_cast<int>(threadIdx.x) / 32 * 16) {
            const int last = min(first + 16, work.queries) - 1;
            any_low = a.first_seen(work.end(first));
            any_high = last < first ? 0 : work.end(last);
            all_low = a.first_seen(work.end(last));
            all_high = last < first + 15 ? 0 : work.end(first);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                numbers[i] = first + threadIdx.x % 32 / 4 + 8 * i;
                const bool exists = numbers[i] < work.queries;
                high[i] = exists ? work.end(numbers[i]) : 0;
                low[i] = a.first_seen(high[i]);
                load(a, work, i, exists);
            }
        }

        __device__ __forceinline__ void load(const Attention& a, const Work<QUERIES>& work, int i, bool exists) {
            const int64_t row = work.sequence.first_row + work.row(numbers[i]);
            const float* q = a.q + row * a.q_stride + work.head(numbers[i]) * a.head_dim;
#pragma unroll
            for (int part = 0; part < 2 * STEPS; ++part) {
                const int d = 8 * part + threadIdx.x % 4 * 2;
                const bool is_there = exists && d < a.head_dim;
                values[part / 2][part % 2 * 2 + i] = is_there ? pair(q[d], q[d + 1]) : 0;
            }
        }

        // Whether any sees a position of the unit.
        __device__ __forceinline__ bool see(int unit) const {
            return unit * UNIT < any_high && (unit + 1) * UNIT > any_low;
        }

        // The scores of a unit, -infinity where a position is not seen.
        __device__ __forceinline__ void mask(int unit, float scale, float (&scores)[KEYS][4]) const {
            const bool all_see = unit * UNIT >= all_low && (unit + 1) * UNIT <= all_high;
#pragma unroll
            for (int i = 0; i < KEYS * 4; ++i) {
                float& score = scores[i / 4][i % 4];
                const int position = unit * UNIT + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, query = i % 4 / 2;
                const bool is_seen = all_see || (position >= low[query] && position < high[query]);
                score = is_seen ? __fmul_rn(score, scale) : -CUDART_INF_F;
            }
        }
    };

    // The softmax of a thread's two queries over some positions, and a thread's part of their weighted values. The sum
    // of weights is of the thread's positions until it is `finished`.
    struct Sums {
        Softmax softmax[2];
        float values[DIMS][4];

        __device__ __forceinline__ void clear() {
            softmax[0] = softmax[1] = empty_softmax();
#pragma unroll
            for (int i = 0; i < DIMS * 4; ++i) values[i / 4][i % 4] = 0.0f;
        }

        // Turns the scores of a unit into weights, and scales what was summed before accordingly.
        __device__ __forceinline__ void weigh(float (&scores)[KEYS][4]) {
            float factors[2];
#pragma unroll
            for (int query = 0; query < 2; ++query) {
                float largest = -CUDART_INF_F;
#pragma unroll
                for (int i = 0; i < KEYS * 2; ++i) largest = fmaxf(largest, scores[i / 2][query * 2 + i % 2]);
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                factors[query] = raise(softmax[query], largest);
                float& sum = softmax[query].sum;
                sum = __fmul_rn(sum, factors[query]);
#pragma unroll
                for (int i = 0; i < KEYS * 2; ++i) {
                    float& score = scores[i / 2][query * 2 + i % 2];
                    score = weight(softmax[query], score);
                    sum = __fadd_rn(sum, score);
                }
            }
#pragma unroll
            for (int i = 0; i < DIMS * 4; ++i) {
                values[i / 4][i % 4] = __fmul_rn(values[i / 4][i % 4], factors[i % 4 / 2]);
            }
        }

        // Adds the weights of all threads of a query.
        __device__ __forceinline__ void finish() {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
                for (int query = 0; query < 2; ++query) {
                    float& sum = softmax[query].sum;
                    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
                }
            }
        }
    };

    // Adds the keys and values of a unit to the sums of a warp.
    static __device__ __forceinline__ void add_unit(const Attention& a, const Queries& queries, int unit,
                                                    uint32_t stage, Sums& sums) {
        const int lane = threadIdx.x % 32;
        // This lane's row and columns of four matrices of keys, and of values.
        const uint32_t keys = stage + ((lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8) * sizeof(bf16);
        const uint32_t values = stage + ((UNIT + lane % 16) * STRIDE + lane / 16 * 8) * sizeof(bf16);
        float scores[KEYS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < KEYS; i += 2) {
                uint32_t k[4];
                load_matrices(k, keys + (i * 8 * STRIDE + step * 16) * sizeof(bf16));
                multiply_add(scores[i], queries.values[step], k[0], k[1]);
                multiply_add(scores[i + 1], queries.values[step], k[2], k[3]);
            }
        }
        queries.mask(unit, a.scale, scores);
        sums.weigh(scores);
#pragma unroll
        for (int i = 0; i < KEYS; i += 2) {
            const uint32_t weights[4] = {pair(scores[i][0], scores[i][1]), pair(scores[i][2], scores[i][3]),
                                         pair(scores[i + 1][0], scores[i + 1][1]),
                                         pair(scores[i + 1][2], scores[i + 1][3])};
#pragma unroll
            for (int d = 0; d < DIMS; d += 2) {
                uint32_t v[4];
                load_matrices_transposed(v, values + (i * 8 * STRIDE + d * 8) * sizeof(bf16));
                multiply_add(sums.values[d], weights, v[0], v[1]);
                multiply_add(sums.values[d + 1], weights, v[2], v[3]);
            }
        }
    }

    // The spans that a thread has folded, whose weighted values are kept in shared memory.
    struct Whole {
        Softmax softmax[2];
        float* values;

        __device__ __forceinline__ explicit Whole(float* values) : values(values + threadIdx.x) {
            softmax[0] = softmax[1] = empty_softmax();
#pragma unroll
            for (int i = 0; i < DIMS * 4; ++i) this->values[i * THREADS] = 0.0f;
        }

        __device__ __forceinline__ void add(const Sums& span) {
            const Factors factors[2] = {fold(softmax[0], span.softmax[0]), fold(softmax[1], span.softmax[1])};
#pragma unroll
            for (int i = 0; i < DIMS * 4; ++i) {
                values[i * THREADS] = factors[i % 4 / 2].add(values[i * THREADS], span.values[i / 4][i % 4]);
            }
        }
    };

    // Writes a thread's part of the output.
    static __device__ __forceinline__ void store(const Attention& a, const Work<QUERIES>& work, const Queries& queries,
                                                 const Whole& whole) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (queries.numbers[i] >= work.queries) return;
            const int64_t row = work.sequence.first_row + work.row(queries.numbers[i]);
            float* out = a.out + row * a.out_stride + work.head(queries.numbers[i]) * a.head_dim;
#pragma unroll
            for (int j = 0; j < DIMS * 2; ++j) {
                const int d = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
                const float value = whole.values[(j / 2 * 4 + i * 2 + j % 2) * THREADS];
                if (d < a.head_dim) out[d] = __fdiv_rn(value, whole.softmax[i].sum);
            }
        }
    }

    // Writes a thread's part of the partial results of a span; of one without a largest score, that there is none.
    static __device__ __forceinline__ void store(const Attention& a, const Work<QUERIES>& work, const Queries& queries,
                                                 const Sums& sums) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int query = queries.numbers[i];
            if (query >= work.queries) return;
            const int64_t partial = a.partial(work.sequence, work.low / SPAN, work.row(query), work.head(query));
            if (threadIdx.x % 4 == 0) a.partial_sums[partial] = {sums.softmax[i].largest, sums.softmax[i].sum};
            if (sums.softmax[i].largest == -CUDART_INF_F) continue;
            float* out = a.partials + partial * a.head_dim;
#pragma unroll
            for (int j = 0; j < DIMS; ++j) {
                const int d = j * 8 + threadIdx.x % 4 * 2;
                const float2 values = {sums.values[j][i * 2], sums.values[j][i * 2 + 1]};
                if (d < a.head_dim) *reinterpret_cast<float2*>(out + d) = values;
            }
        }
    }

    static __device__ __forceinline__ void run(const Attention& a) {
        const Work<QUERIES> work(a);
        if (work.is_empty()) return;
        extern __shared__ __align__(16) bf16 shared[];
        __shared__ int slots[2][UNIT];
        const Loader loader = {a, work, shared_address(shared), slots};
        const int first = work.low / UNIT, last = (work.high - 1) / UNIT;
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            loader.keep(first + i, loader.look_up(first + i));
            __syncthreads();
            loader.copy(first + i);
        }
        loader.keep(first + STAGES - 1, loader.look_up(first + STAGES - 1));
        const Queries queries(a, work);
        Whole whole(reinterpret_cast<float*>(shared + STAGES * STAGE));
        Sums span;
        span.clear();
        for (int unit = first; unit <= last; ++unit) {
            wait_for_copies<STAGES - 2>();
            // All threads see the unit and the next slots, and have used the unit that is overwritten.
            __syncthreads();
            loader.copy(unit + STAGES - 1);
            const int next_slot = loader.look_up(unit + STAGES);
            if (queries.see(unit)) add_unit(a, queries, unit, loader.stage(unit), span);
            if ((unit + 1) % (SPAN / UNIT) == 0 || unit == last) {
                span.finish();
                if (a.partials) return store(a, work, queries, span);
                whole.add(span);
                span.clear();
            }
            loader.keep(unit + STAGES, next_slot);
        }
        store(a, work, queries, whole);
    }
};

ATTENTION_KERNEL(attention_bf16_32_x1, TensorCores<32, 1, 3>)
ATTENTION_KERNEL(attention_bf16_64_x1, TensorCores<64, 1, 3>)
ATTENTION_KERNEL(attention_bf16_128_x1, TensorCores<128, 1, 3>)
ATTENTION_KERNEL(attention_bf16_256_x1, TensorCores<256, 1, 2>)
ATTENTION_KERNEL(attention_bf16_32_x4, TensorCores<32, 4, 2>)
ATTENTION_KERNEL(attention_bf16_64_x4, TensorCores<64, 4, 2>)
ATTENTION_KERNEL(attention_bf16_128_x4, TensorCores<128, 4, 2>)
ATTENTION_KERNEL(attention_bf16_256_x2, TensorCores<256, 2, 2>)
