// Paged attention: what its kernels share.
//
// A query is a row of the step with one of its heads; those that share a KV head are numbered by row, then by head. A
// query's softmax is computed for each span of positions on its own, unit by unit, and the spans are folded, both in
// ascending order from multiples of their sizes: so no bit depends on which queries a block has, or on who folds.
#pragma once

#include <cuda_bf16.h>
#include <math_constants.h>
#include <stdint.h>

// Positions that are folded as one. SPAN in src/cuda/attention/plan.rs.
constexpr int SPAN = 256;
// Positions that are read and weighted at once.
constexpr int UNIT = 32;

// Rows of a sequence in a step. `write` in src/cuda/attention/plan.rs.
struct Sequence {
    // Rows of the sequences before it.
    uint32_t rows_before;
    // Its first row in the query and the output.
    uint32_t first_row;
    uint32_t rows;
    // Position of its first row.
    uint32_t start;
    // End of the positions that all of its rows see; 0 if a row sees those up to its own.
    uint32_t visible;
    // Where its block table begins, in words from the first sequence.
    uint32_t table;
    // Partial results of the sequences before it, for each head.
    uint32_t partials;

    // End of the positions that a row sees.
    __device__ __forceinline__ int end(int row) const { return visible ? visible : start + row + 1; }
};

// What one call computes.
struct Attention {
    float* out;
    int64_t out_stride;
    const float* q;
    int64_t q_stride;
    // `[blocks, kv_heads, block_size, head_dim]`.
    const void* keys;
    const void* values;
    const Sequence* sequences;
    int count;
    int heads;
    int kv_heads;
    int head_dim;
    int block_size;
    // Factor of q . k, by which powers of 2 are weights.
    float scale;
    // Positions that a row sees at most.
    int window;
    // Where each span of a block's own puts its weighted values, `[head_dim]`, and a `float2` of the largest score and
    // the sum of weights; null if a block computes all spans of its queries.
    float* partials;
    float2* partial_sums;

    __device__ __forceinline__ int group() const { return heads / kv_heads; }

    // The first position that a row sees, given the end of those that it sees.
    __device__ __forceinline__ int first_seen(int end) const { return max(0, end - window); }

    // Number of a partial result.
    __device__ __forceinline__ int64_t partial(const Sequence& s, int span, int row, int head) const {
        return (s.partials + static_cast<int64_t>(span) * s.rows + row) * heads + head;
    }
};

// The last of `count` sequences of which `begins_by(i)` is true, for a whole warp: true for the first, and for none
// after one for which it is false.
template <typename BeginsBy>
__device__ __forceinline__ int find_sequence(int count, BeginsBy begins_by) {
    int low = 0;
    for (int left = count; left > 1;) {
        const int step = (left + 31) / 32;
        const int probe = threadIdx.x % 32 * step;
        const unsigned begun = __ballot_sync(~0u, probe < left && begins_by(low + probe));
        const int skipped = (__popc(begun) - 1) * step;
        low += skipped;
        left = min(step, left - skipped);
    }
    return low;
}

// The queries of one KV head that a block computes, up to QUERIES of a sequence, and the positions that it reads.
// Block `x` of the grid has the `x`-th of these, counting one more for each sequence than it may need; block `y` is of
// KV head `y`; block `z` computes the `z`-th span of its queries if it has one to itself.
template <int QUERIES>
struct Work {
    Sequence sequence;
    // Blocks of the sequence.
    const uint32_t* table;
    int group;
    // Of the sequence, and which of them the block begins with.
    int queries, first_query;
    // Positions that any of the block's queries sees, of the block's span.
    int low, high;

    __device__ __forceinline__ Work(const Attention& a) : group(a.group()) {
        const auto first_block = [&](int i) {
            return static_cast<int>(static_cast<int64_t>(a.sequences[i].rows_before) * group / QUERIES) + i;
        };
        const int block = blockIdx.x;
        const int index = find_sequence(a.count, [&](int i) { return first_block(i) <= block; });
        sequence = a.sequences[index];
        table = reinterpret_cast<const uint32_t*>(a.sequences) + sequence.table;
        queries = sequence.rows * group;
        first_query = (block - first_block(index)) * QUERIES;
        low = a.first_seen(end(first_query));
        high = end(min(first_query + QUERIES, queries) - 1);
        if (a.partials) {
            const int span = low / SPAN + blockIdx.z;
            low = max(low, span * SPAN);
            high = min(high, (span + 1) * SPAN);
        }
        if (first_query >= queries) high = low;
    }

    // Whether there is nothing to do.
    __device__ __forceinline__ bool is_empty() const { return low >= high; }

    __device__ __forceinline__ int row(int query) const { return query / group; }

    // End of the positions that a query sees.
    __device__ __forceinline__ int end(int query) const { return sequence.end(row(query)); }

    __device__ __forceinline__ int head(int query) const { return blockIdx.y * group + query % group; }

    // Where the position's key and value lie, in rows of a head; -1 if no query sees it.
    __device__ __forceinline__ int slot(const Attention& a, int position) const {
        if (position < low || position >= high) return -1;
        const int block = table[position / a.block_size];
        return (block * a.kv_heads + blockIdx.y) * a.block_size + position % a.block_size;
    }
};

// A query's softmax over some of the positions: the largest score, and the sum of 2^(score - largest). Weighted values
// are kept beside it.
struct Softmax {
    float largest, sum;
};

__device__ __forceinline__ Softmax empty_softmax() {
    return {-CUDART_INF_F, 0.0f};
}

// Factors of weighted values that are added up.
struct Factors {
    float old, next;

    __device__ __forceinline__ float add(float old_value, float next_value) const {
        return __fmaf_rn(next_value, next, __fmul_rn(old_value, old));
    }
};

// Raises the largest score to that of more positions, if one of them is seen: returns the factor of what was summed.
__device__ __forceinline__ float raise(Softmax& softmax, float largest) {
    if (largest <= softmax.largest) return 1.0f;
    const float factor = exp2f(__fsub_rn(softmax.largest, largest));
    softmax.largest = largest;
    return factor;
}

// The weight of a score in a softmax that it has raised; 0 for that of a position that is not seen.
__device__ __forceinline__ float weight(const Softmax& softmax, float score) {
    return score == -CUDART_INF_F ? 0.0f : exp2f(__fsub_rn(score, softmax.largest));
}

// Adds the next span, in which any position is seen or none.
__device__ __forceinline__ Factors fold(Softmax& softmax, const Softmax& next) {
    if (next.largest == -CUDART_INF_F) return {1.0f, 0.0f};
    const float largest = fmaxf(softmax.largest, next.largest);
    const Factors factors = {exp2f(__fsub_rn(softmax.largest, largest)), exp2f(__fsub_rn(next.largest, largest))};
    softmax = {largest, factors.add(softmax.sum, next.sum)};
    return factors;
}

// A kernel that runs `KERNEL`, with the fields of `Attention` as its parameters.
#define ATTENTION_KERNEL(NAME, ...)                                                                                  \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS)                                               \
        NAME(float* out, int64_t out_stride, const float* q, int64_t q_stride, const void* keys, const void* values, \
             const Sequence* sequences, int count, int heads, int kv_heads, int head_dim, int block_size,            \
             float scale, int window, float* partials, float2* partial_sums) {                                       \
        __VA_ARGS__::run(Attention{out, out_stride, q, q_stride, keys, values, sequences, count, heads, kv_heads,    \
                                   head_dim, block_size, scale, window, partials, partial_sums});                    \
    }
