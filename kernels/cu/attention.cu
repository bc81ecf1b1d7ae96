// The end of paged attention where each span has a block of its own.

#include "attention.cuh"

// Folds the spans of a query in ascending order. Block `x` of the grid is of the `x`-th row of all sequences, block `y`
// of a head; a thread has four dimensions. Rows behind those of all sequences are of an empty one.
struct FoldSpans {
    static constexpr int THREADS = 64;

    static __device__ __forceinline__ void run(const Attention& a) {
        const uint32_t in_step = blockIdx.x;
        const int index = find_sequence(a.count, [&](int i) { return a.sequences[i].rows_before <= in_step; });
        const Sequence s = a.sequences[index];
        const int row = in_step - s.rows_before, head = blockIdx.y, end = s.end(row), d = threadIdx.x * 4;
        if (row >= static_cast<int>(s.rows) || d >= a.head_dim) return;
        Softmax whole = empty_softmax();
        float sums[4] = {};
        for (int span = a.first_seen(end) / SPAN; span * SPAN < end; ++span) {
            const int64_t partial = a.partial(s, span, row, head);
            const float2 softmax = a.partial_sums[partial];
            // All scores are NaN or minus infinity: nothing lies there to be folded.
            if (softmax.x == -CUDART_INF_F) continue;
            const float4 next = *reinterpret_cast<const float4*>(&a.partials[partial * a.head_dim + d]);
            const Factors factors = fold(whole, {softmax.x, softmax.y});
            sums[0] = factors.add(sums[0], next.x);
            sums[1] = factors.add(sums[1], next.y);
            sums[2] = factors.add(sums[2], next.z);
            sums[3] = factors.add(sums[3], next.w);
        }
        float* out = a.out + (s.first_row + row) * a.out_stride + head * a.head_dim + d;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = __fdiv_rn(sums[i], whole.sum);
    }
};

ATTENTION_KERNEL(fold_spans, FoldSpans)
