// The low-rank delta of an adapter, added to weights with the bits of the CPU: a sum over k ascending by fused
// multiply-add from zero, which is scaled and rounded, and added to the base.

#include "weights.cuh"

// What a block adds to, of which a thread has 8 rows by 4 columns, and what it stages of k.
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, DEPTH = 16, THREADS = 256;
constexpr int ROWS = 8, COLUMNS = 4;
// Threads side by side, whose columns alternate.
constexpr int ACROSS = TILE_COLUMNS / COLUMNS;
static_assert(TILE_ROWS / ROWS * ACROSS == THREADS, "a thread for each part of the tile");

// Does what `code` says, two bits for each step: 1 rounds to float16, 2 to bfloat16, 3 multiplies by `scaling`, and 0
// ends the list.
__device__ __forceinline__ float scaled_and_rounded(uint32_t code, float scaling, float x) {
    for (; code != 0; code >>= 2) {
        const uint32_t step = code & 3;
        x = step == 3 ? x * scaling : step == 1 ? __half2float(__float2half_rn(x)) : widen(rounded<Bf16>(x));
    }
    return x;
}

// Parts of `a[rank, columns]` and `b[rows, rank]`, by k.
struct Stage {
    float a[DEPTH][TILE_COLUMNS];
    // Padding keeps what a warp stores in different banks.
    float b[DEPTH][TILE_ROWS + 4];
};

// Loads k from `k0` on. Past the rank a product is -0, whose addition changes nothing, not even the sign of a zero.
__device__ __forceinline__ void load(Stage& stage, const float* a, const float* b, int rows, int columns, int rank,
                                     int k0) {
    const int row0 = blockIdx.x * TILE_ROWS, column0 = blockIdx.y * TILE_COLUMNS;
#pragma unroll
    for (int i = threadIdx.x; i < DEPTH * TILE_COLUMNS; i += THREADS) {
        const int k = i / TILE_COLUMNS, column = i % TILE_COLUMNS;
        const bool exists = k0 + k < rank && column0 + column < columns;
        stage.a[k][column] = exists ? a[static_cast<int64_t>(k0 + k) * columns + column0 + column] : 0.0f;
    }
#pragma unroll
    for (int i = threadIdx.x; i < DEPTH * TILE_ROWS; i += THREADS) {
        const int k = i % DEPTH, row = i / DEPTH;
        const bool exists = k0 + k < rank && row0 + row < rows;
        stage.b[k][row] = exists ? b[static_cast<int64_t>(row0 + row) * rank + k0 + k] : -0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void add_low_rank(T* w, int64_t stride, int run, int padded_run, const float* a,
                                             const float* b, int rows, int columns, int rank, float scaling,
                                             uint32_t steps) {
    __shared__ __align__(16) Stage stage;
    const int row = threadIdx.x / ACROSS * ROWS, column = threadIdx.x % ACROSS;
    float sums[ROWS][COLUMNS] = {};
    for (int k0 = 0; k0 < rank; k0 += DEPTH) {
        load(stage, a, b, rows, columns, rank, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float mine[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i += 4) {
                *reinterpret_cast<float4*>(&mine[i]) = *reinterpret_cast<const float4*>(&stage.b[k][row + i]);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float other = stage.a[k][column + j * ACROSS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) sums[i][j] = fmaf(mine[i], other, sums[i][j]);
            }
        }
        __syncthreads();
    }
    const int row0 = blockIdx.x * TILE_ROWS + row, column0 = blockIdx.y * TILE_COLUMNS + column;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int at = column0 + j * ACROSS;
        if (at >= columns) break;
        T* to = w + row0 * stride + place(at, run, padded_run);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (row0 + i >= rows) break;
            const float delta = scaled_and_rounded(steps, scaling, sums[i][j]);
            to[i * stride] = rounded<T>(widen(to[i * stride]) + delta);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_low_rank_bf16(Bf16* w, int64_t stride, int run, int padded_run, const float* a, const float* b, int rows,
                      int columns, int rank, float scaling, uint32_t steps) {
    add_low_rank(w, stride, run, padded_run, a, b, rows, columns, rank, scaling, steps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_low_rank_f32(float* w, int64_t stride, int run, int padded_run, const float* a, const float* b, int rows,
                     int columns, int rank, float scaling, uint32_t steps) {
    add_low_rank(w, stride, run, padded_run, a, b, rows, columns, rank, scaling, steps);
}
