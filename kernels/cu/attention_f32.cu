// Paged attention over float32 keys and values, in float32: each score and each weighted value is a chain of fused
// multiply-adds, by ascending dimension and by ascending position.

#include "attention.cuh"

struct Chains {
    static constexpr int THREADS = 128;
    // Queries of a block, and threads of each: they share the positions of a unit, then the dimensions.
    static constexpr int QUERIES = 16, LANES = THREADS / QUERIES;
    // Scores of a thread.
    static constexpr int SCORES = UNIT / LANES;
    static constexpr int MAX_HEAD_DIM = 256;
    // Dimensions of a thread: some of four each.
    static constexpr int FOURS = MAX_HEAD_DIM / 4 / LANES;
    // Values after each row in shared memory, so that neighbouring rows begin in other banks.
    static constexpr int PADDING = 4;

    // Copies a unit's keys and values; zeros for positions that no query sees, whose slots may hold anything.
    static __device__ __forceinline__ void load(const Attention& a, const int (&slots)[UNIT], float* keys,
                                                float* values) {
        const int fours = a.head_dim / 4, stride = a.head_dim + PADDING;
        for (int i = threadIdx.x; i < UNIT * fours; i += THREADS) {
            const int position = i / fours, d = i % fours * 4;
            const int64_t at = static_cast<int64_t>(slots[position]) * a.head_dim + d;
            float4 key = {}, value = {};
            if (slots[position] >= 0) {
                key = *reinterpret_cast<const float4*>(static_cast<const float*>(a.keys) + at);
                value = *reinterpret_cast<const float4*>(static_cast<const float*>(a.values) + at);
            }
            *reinterpret_cast<float4*>(&keys[position * stride + d]) = key;
            *reinterpret_cast<float4*>(&values[position * stride + d]) = value;
        }
    }

    // q . k for positions LANE, LANE + LANES, ... of a unit.
    static __device__ __forceinline__ void multiply(const float* q, const float* keys, int head_dim,
                                                    float (&scores)[SCORES]) {
        const int stride = head_dim + PADDING, lane = threadIdx.x % LANES;
        for (int d = 0; d < head_dim; d += 4) {
            const float4 x = *reinterpret_cast<const float4*>(&q[d]);
#pragma unroll
            for (int i = 0; i < SCORES; ++i) {
                const float4 key = *reinterpret_cast<const float4*>(&keys[(lane + i * LANES) * stride + d]);
                scores[i] = __fmaf_rn(x.x, key.x, scores[i]);
                scores[i] = __fmaf_rn(x.y, key.y, scores[i]);
                scores[i] = __fmaf_rn(x.z, key.z, scores[i]);
                scores[i] = __fmaf_rn(x.w, key.w, scores[i]);
            }
        }
    }

    // Adds a unit's weighted values.
    static __device__ __forceinline__ void add_values(const float* weights, const float* values, int head_dim,
                                                      float factor, float (&sums)[FOURS][4]) {
        const int stride = head_dim + PADDING;
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const int d = (threadIdx.x % LANES + i * LANES) * 4;
            if (d >= head_dim) return;
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = __fmul_rn(sums[i][j], factor);
            for (int position = 0; position < UNIT; ++position) {
                const float4 value = *reinterpret_cast<const float4*>(&values[position * stride + d]);
                sums[i][0] = __fmaf_rn(weights[position], value.x, sums[i][0]);
                sums[i][1] = __fmaf_rn(weights[position], value.y, sums[i][1]);
                sums[i][2] = __fmaf_rn(weights[position], value.z, sums[i][2]);
                sums[i][3] = __fmaf_rn(weights[position], value.w, sums[i][3]);
            }
        }
    }

    // The largest or the sum over the threads of a query, in each of them.
    template <typename Combine>
    static __device__ __forceinline__ float over_lanes(float x, Combine combine) {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            x = combine(x, __shfl_xor_sync(~0u, x, distance));
        }
        return x;
    }

    static __device__ __forceinline__ void store(float* to, int head_dim, const float (&sums)[FOURS][4],
                                                 float divisor) {
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const int d = (threadIdx.x % LANES + i * LANES) * 4;
            if (d >= head_dim) return;
#pragma unroll
            for (int j = 0; j < 4; ++j) to[d + j] = __fdiv_rn(sums[i][j], divisor);
        }
    }

    static __device__ __forceinline__ void run(const Attention& a) {
        const Work<QUERIES> work(a);
        if (work.is_empty()) return;
        extern __shared__ __align__(16) float shared[];
        __shared__ int slots[UNIT];
        __shared__ float all_weights[QUERIES][UNIT];
        const int stride = a.head_dim + PADDING, lane = threadIdx.x % LANES, in_block = threadIdx.x / LANES;
        float* q = shared + in_block * stride;
        float* keys = shared + QUERIES * stride;
        float* values = keys + UNIT * stride;
        float* weights = all_weights[in_block];
        const int query = work.first_query + in_block;
        const bool exists = query < work.queries;
        const int end = exists ? work.end(query) : 0, first_seen = a.first_seen(end);
        const int64_t row = work.sequence.first_row + work.row(query), column = work.head(query) * a.head_dim;
        for (int d = lane; d < a.head_dim; d += LANES) {
            q[d] = exists ? a.q[row * a.q_stride + column + d] : 0.0f;
        }
        Softmax whole = empty_softmax(), span = empty_softmax();
        float whole_sums[FOURS][4] = {}, sums[FOURS][4] = {};
        const int first_unit = work.low / UNIT, last_unit = (work.high - 1) / UNIT;
        if (threadIdx.x < UNIT) slots[threadIdx.x] = work.slot(a, first_unit * UNIT + threadIdx.x);
        for (int unit = first_unit; unit <= last_unit; ++unit) {
            // The slots are there, and all threads have used the unit that is overwritten.
            __syncthreads();
            load(a, slots, keys, values);
            __syncthreads();
            if (threadIdx.x < UNIT) slots[threadIdx.x] = work.slot(a, (unit + 1) * UNIT + threadIdx.x);
            float scores[SCORES] = {};
            multiply(q, keys, a.head_dim, scores);
            float largest = -CUDART_INF_F;
#pragma unroll
            for (int i = 0; i < SCORES; ++i) {
                const int key = unit * UNIT + lane + i * LANES;
                const bool is_seen = key >= first_seen && key < end;
                scores[i] = is_seen ? __fmul_rn(scores[i], a.scale) : -CUDART_INF_F;
                largest = fmaxf(largest, scores[i]);
            }
            const float factor = raise(span, over_lanes(largest, [](float x, float y) { return fmaxf(x, y); }));
            span.sum = __fmul_rn(span.sum, factor);
#pragma unroll
            for (int i = 0; i < SCORES; ++i) {
                weights[lane + i * LANES] = weight(span, scores[i]);
                span.sum = __fadd_rn(span.sum, weights[lane + i * LANES]);
            }
            __syncwarp();
            add_values(weights, values, a.head_dim, factor, sums);
            if ((unit + 1) % (SPAN / UNIT) != 0 && unit != last_unit) continue;
            span.sum = over_lanes(span.sum, [](float x, float y) { return __fadd_rn(x, y); });
            if (a.partials) break;
            const Factors factors = fold(whole, span);
#pragma unroll
            for (int i = 0; i < FOURS * 4; ++i) {
                float& sum = sums[i / 4][i % 4];
                whole_sums[i / 4][i % 4] = factors.add(whole_sums[i / 4][i % 4], sum);
                sum = 0.0f;
            }
            span = empty_softmax();
        }
        if (!exists) return;
        if (!a.partials) {
            store(a.out + row * a.out_stride + column, a.head_dim, whole_sums, whole.sum);
        } else {
            const int64_t partial = a.partial(work.sequence, work.low / SPAN, work.row(query), work.head(query));
            store(a.partials + partial * a.head_dim, a.head_dim, sums, 1.0f);
            if (lane == 0) a.partial_sums[partial] = {span.largest, span.sum};
        }
    }
};

ATTENTION_KERNEL(attention_f32, Chains)
