// Mixtures of experts: routing, sorting of (row, expert) pairs by expert, and the weighted sum of their outputs. The
// grouped linear layers are in linear_bf16.cu and linear_f32.cu.

#include <math_constants.h>
#include <stdint.h>

#include "activation.cuh"
#include "leaves.cuh"
#include "warp.cuh"
#include "weights.cuh"

namespace {

// In place of the first expert of a row that is not forced. NOT_FORCED in src/routing_shape.rs.
constexpr uint32_t NOT_FORCED = 0xffff;
// Added to the sum by which sigmoids are normalised, as in transformers.
constexpr float SIGMOID_EPS = 1e-20f;
// Warps of a block that computes logits.
constexpr int WARPS = 8;
// Outputs of experts that a thread loads before it adds them.
constexpr int AT_ONCE = 8;

// The logits of `ROWS` rows for `EXPERTS` experts a warp. A lane sums every 32nd product with one rounding each, and
// the lanes' sums meet in a butterfly: no bit depends on `ROWS` or `EXPERTS`.
template <int ROWS, int EXPERTS, typename T>
__device__ __forceinline__ void router_logits(const float* x, int64_t x_stride, const T* gate, int64_t gate_stride,
                                              float* logits, int64_t logits_stride, int rows, int experts, int width) {
    const int lane = threadIdx.x % WARP, row0 = blockIdx.x * ROWS;
    const int expert0 = (blockIdx.y * WARPS + threadIdx.x / WARP) * EXPERTS;
    if (expert0 >= experts) return;
    float sums[ROWS][EXPERTS] = {};
#pragma unroll(ROWS* EXPERTS == 1 ? 8 : 1)
    for (int k = lane; k < width; k += WARP) {
        float w[EXPERTS];
#pragma unroll
        for (int i = 0; i < EXPERTS; ++i) w[i] = widen(gate[min(expert0 + i, experts - 1) * gate_stride + k]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float value = x[min(row0 + row, rows - 1) * x_stride + k];
#pragma unroll
            for (int i = 0; i < EXPERTS; ++i) sums[row][i] = fmaf(value, w[i], sums[row][i]);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int i = 0; i < EXPERTS; ++i) {
            const float sum = warp_sum(sums[row][i]);
            const bool exists = row0 + row < rows && expert0 + i < experts;
            if (lane == 0 && exists) logits[(row0 + row) * logits_stride + expert0 + i] = sum;
        }
    }
}

// Whether an expert comes before another: by descending value, those of equal values by number.
__device__ __forceinline__ bool is_before(float value, int expert, float other_value, int other) {
    return value > other_value || (value == other_value && expert < other);
}

// Writes the `top_k` experts with the highest scores, which are values with their bias, if there is one.
__device__ __forceinline__ void choose(const float* values, const float* bias, int experts, int top_k, int* chosen) {
    float last = CUDART_INF_F;
    int last_expert = -1;
    for (int place = 0; place < top_k; ++place) {
        float best = -CUDART_INF_F;
        int best_expert = experts;
        for (int expert = threadIdx.x; expert < experts; expert += WARP) {
            const float score = bias ? values[expert] + bias[expert] : values[expert];
            const bool is_left = is_before(last, last_expert, score, expert);
            if (is_left && is_before(score, expert, best, best_expert)) {
                best = score;
                best_expert = expert;
            }
        }
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            const float score = __shfl_xor_sync(ALL, best, distance);
            const int expert = __shfl_xor_sync(ALL, best_expert, distance);
            if (is_before(score, expert, best, best_expert)) {
                best = score;
                best_expert = expert;
            }
        }
        if (threadIdx.x == 0) chosen[place] = best_expert;
        last = best;
        last_expert = best_expert;
    }
}

__device__ __forceinline__ float largest_of(const float* values, int count) {
    float largest = -CUDART_INF_F;
    for (int i = threadIdx.x; i < count; i += WARP) largest = fmaxf(largest, values[i]);
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, distance));
    }
    return largest;
}

// The sum of values, added by ascending index.
__device__ __forceinline__ float sum_of(const float* values, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) sum += values[i];
    return sum;
}

__device__ __forceinline__ float sum_of_powers(const float* values, int count, float largest) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += WARP) sum += expf(values[i] - largest);
    return warp_sum(sum);
}

// The output of one of a row's experts.
struct Term {
    // Index of its pair.
    uint32_t row;
    // Index of its group of neighbouring experts.
    int group;
    float weight;
};

}  // namespace

#define ROUTER_LOGITS(NAME, ROWS, EXPERTS, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP)                                                        \
        NAME(const float* x, int64_t x_stride, const T* gate, int64_t gate_stride, float* logits,                    \
             int64_t logits_stride, int rows, int experts, int width) {                                              \
        router_logits<ROWS, EXPERTS>(x, x_stride, gate, gate_stride, logits, logits_stride, rows, experts, width);   \
    }

ROUTER_LOGITS(router_logits_bf16_1x1, 1, 1, Bf16)
ROUTER_LOGITS(router_logits_bf16_8x4, 8, 4, Bf16)
ROUTER_LOGITS(router_logits_f32_1x1, 1, 1, float)
ROUTER_LOGITS(router_logits_f32_8x4, 8, 4, float)

// Chooses the experts of a row by its logits and weighs them; see `Ops::route`. `bias` is null for a softmax, and then
// the logits stay; `forced` `[rows, top_k]` may be null. `kept` is another place for the experts, in rows of
// `kept_row`, or null. One warp for each row.
extern "C" __global__ void __launch_bounds__(WARP)
    route(float* logits, int64_t logits_stride, int experts, const float* bias, const uint32_t* forced, int normalise,
          float scale, int top_k, uint16_t* chosen, float* weights, uint16_t* kept, int kept_row) {
    extern __shared__ float values[];
    float* sorted = values + top_k;
    int* numbers = reinterpret_cast<int*>(sorted + top_k);
    float* row = logits + blockIdx.x * logits_stride;
    const int lane = threadIdx.x;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * top_k;
    const uint32_t* given = forced && forced[first] != NOT_FORCED ? forced + first : nullptr;
    bool is_finite = true;
    for (int i = lane; i < experts; i += WARP) is_finite &= isfinite(row[i]) && !(bias && isnan(bias[i]));
    if (!__all_sync(ALL, is_finite)) {
        for (int i = lane; i < top_k; i += WARP) {
            const int expert = given ? given[i] : i;
            chosen[first + i] = expert;
            if (kept) kept[blockIdx.x * kept_row + i] = expert;
            weights[first + i] = CUDART_NAN_F;
        }
        return;
    }
    if (bias) {
        for (int i = lane; i < experts; i += WARP) row[i] = sigmoid(row[i]);
    }
    __syncwarp();
    if (given) {
        for (int i = lane; i < top_k; i += WARP) numbers[i] = given[i];
    } else {
        choose(row, bias, experts, top_k, numbers);
    }
    __syncwarp();
    for (int i = lane; i < top_k; i += WARP) values[i] = row[numbers[i]];
    __syncwarp();
    // Powers relative to the largest of those that are divided are never all 0.
    const float largest = normalise ? largest_of(values, top_k) : largest_of(row, experts);
    if (!bias) {
        for (int i = lane; i < top_k; i += WARP) values[i] = expf(values[i] - largest);
    }
    __syncwarp();
    for (int i = lane; i < top_k; i += WARP) {
        int place = 0;
        for (int j = 0; j < top_k; ++j) place += is_before(values[j], numbers[j], values[i], numbers[i]);
        sorted[place] = values[i];
        chosen[first + place] = numbers[i];
        if (kept) kept[blockIdx.x * kept_row + place] = numbers[i];
    }
    __syncwarp();
    float divisor = 1.0f;
    if (normalise) {
        divisor = sum_of(sorted, top_k) + (bias ? SIGMOID_EPS : 0.0f);
    } else if (!bias) {
        divisor = sum_of_powers(row, experts, largest);
    }
    for (int i = lane; i < top_k; i += WARP) weights[first + i] = sorted[i] / divisor * scale;
}

// Sorts the pairs of rows and this rank's experts by expert and then by row. `chosen` `[entries / top_k, top_k]` are the
// experts of the rows from `first_row` on. Writes the row of each pair, the first pair of each expert and the end of
// the last one's, and the pair of each entry of an expert of this rank. One warp for each expert.
extern "C" __global__ void __launch_bounds__(128)
    group_by_expert(const uint16_t* chosen, int entries, int top_k, int first_row, int first_expert, int experts,
                    uint32_t* tokens, uint32_t* starts, uint32_t* places) {
    const int lane = threadIdx.x % WARP, expert = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (expert >= experts) return;
    int before = 0;
    for (int i = lane; i < entries; i += WARP) {
        const int other = chosen[i] - first_expert;
        before += other >= 0 && other < expert;
    }
    int next = warp_sum(before);
    if (lane == 0) starts[expert] = next;
    for (int at = 0; at < entries; at += WARP) {
        const int i = at + lane;
        const bool is_own = i < entries && chosen[i] == first_expert + expert;
        const unsigned own = __ballot_sync(ALL, is_own);
        if (is_own) {
            const int place = next + __popc(own & ((1u << lane) - 1));
            tokens[place] = first_row + i / top_k;
            places[i] = place;
        }
        next += __popc(own);
    }
    if (lane == 0 && expert == experts - 1) starts[experts] = next;
}

// out = the weighted sum of the pairs of each row with experts of this rank, in the order that `Ops::combine`
// documents. `groups` are this rank's. Blocks work on one row, threads on one column.
extern "C" __global__ void __launch_bounds__(256)
    combine_experts(const float* x, int64_t x_stride, const uint16_t* chosen, const float* weights,
                    const uint32_t* places, int top_k, int first_expert, int experts, int groups, float* out,
                    int64_t out_stride, int width) {
    extern __shared__ Term terms[];
    const int64_t first = static_cast<int64_t>(blockIdx.x) * top_k;
    int count = 0;
    for (int i = 0; i < top_k; ++i) {
        const int expert = chosen[first + i] - first_expert;
        count += expert >= 0 && expert < experts;
    }
    for (int i = threadIdx.x; i < top_k; i += blockDim.x) {
        const int expert = chosen[first + i] - first_expert;
        if (expert < 0 || expert >= experts) continue;
        int place = 0;
        for (int j = 0; j < top_k; ++j) {
            const int other = chosen[first + j] - first_expert;
            place += other >= 0 && other < expert;
        }
        terms[place] = {places[first + i], expert / (experts / groups), weights[first + i]};
    }
    __syncthreads();
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float sums[MAX_LEAVES] = {};
    for (int at = 0; at < count; at += AT_ONCE) {
        float values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) values[i] = at + i < count ? x[terms[at + i].row * x_stride + column] : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (at + i == count) break;
            const float product = terms[at + i].weight * values[i];
#pragma unroll
            for (int group = 0; group < MAX_LEAVES; ++group) {
                if (group == terms[at + i].group) sums[group] += product;
            }
        }
    }
    out[blockIdx.x * out_stride + column] = sum_leaves(sums, groups);
}

// out += sigmoid(gates) * shared, with one gate for each row. One block for each row.
extern "C" __global__ void add_gated(const float* gates, int64_t gates_stride, const float* shared,
                                     int64_t shared_stride, float* out, int64_t out_stride, int width) {
    const float weight = sigmoid(gates[blockIdx.x * gates_stride]);
    const float* from = shared + blockIdx.x * shared_stride;
    float* to = out + blockIdx.x * out_stride;
    for (int column = threadIdx.x; column < width; column += blockDim.x) to[column] += weight * from[column];
}
