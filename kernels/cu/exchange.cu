// What ranks do with the values that they have gathered from one another: `[ranks, ...]`, rank 0's first.

#include <stdint.h>

namespace {

// The sum of a balanced binary tree over `RANKS` parts: the sum of the first half plus the sum of the second half.
template <int RANKS>
__device__ __forceinline__ float tree_sum(const float *part, int64_t count) {
    if constexpr (RANKS == 1) {
        return *part;
    } else {
        constexpr int HALF = RANKS / 2;
        float left = tree_sum<HALF>(part, count);
        return __fadd_rn(left, tree_sum<RANKS - HALF>(part + HALF * count, count));
    }
}

template <int RANKS>
__device__ __forceinline__ void sum_parts(const float *parts, int64_t count, float *out) {
    int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        out[i] = tree_sum<RANKS>(parts + i, count);
    }
}

}  // namespace

// out[i] = the tree sum of parts[rank][i] over the ranks; each rank has `count` values.
#define SUM_PARTS(RANKS)                                                                                       \
    extern "C" __global__ void sum_parts_##RANKS(const float *parts, int64_t count, float *out) {             \
        sum_parts<RANKS>(parts, count, out);                                                                   \
    }

SUM_PARTS(2)
SUM_PARTS(3)
SUM_PARTS(4)
SUM_PARTS(5)
SUM_PARTS(6)
SUM_PARTS(7)
SUM_PARTS(8)

// out[row] = the columns of that row of all ranks side by side; each rank has `[rows, width]`, and those of the last rank
// beyond `columns` are left out. A block for each row and each rank.
extern "C" __global__ void join_columns(const float *parts, int width, float *out, int columns) {
    int64_t row = blockIdx.x, rank = blockIdx.y, rows = gridDim.x;
    const float *from = parts + (rank * rows + row) * width;
    int first = blockIdx.y * width, end = min(width, columns - first);
    float *to = out + row * columns + first;
    for (int column = threadIdx.x; column < end; column += blockDim.x) to[column] = from[column];
}
