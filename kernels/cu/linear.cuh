// Shared by the linear layers of bfloat16 and float32 weights; also finds the tile of a block among the experts' pairs.
#pragma once

#include <stdint.h>

#include "warp.cuh"

// `out = x w^T + bias`, or the sums of some leaves of it.
struct Product {
    // `[m, n]`; that of block `z` of the grid is `out_part` values after that of block `z - 1`.
    float* out;
    int64_t out_stride;
    int64_t out_part;
    // `[m]` rows of runs, one for each leaf.
    const void* x;
    int64_t x_stride;
    // Values from the start of a run of `x` to that of the next.
    int x_run;
    // Values of a run of `x` that are not padding.
    int x_values;
    // `[n]` rows of runs that are padded with zeros.
    const void* w;
    int64_t w_stride;
    int w_run;
    // `[n]`, or null.
    const float* bias;
    int m;
    int n;
    // The first row of the block's tile.
    int row0;
    // Leaves that each block sums: block `z` of the grid those from `leaves * z` on.
    int leaves;
};

// A kernel that runs a tile's share of a product, whose fields are its parameters.
#define PRODUCT_KERNEL(NAME, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, __VA_ARGS__::MIN_BLOCKS)     \
        NAME(float* out, int64_t out_stride, int64_t out_part, const void* x, int64_t x_stride, int x_run,\
             int x_values, const void* w, int64_t w_stride, int w_run, const float* bias, int m, int n,\
             int leaves) {                                                                          \
        __VA_ARGS__::run(Product{out, out_stride, out_part, x, x_stride, x_run, x_values, w, w_stride, w_run,\
                                 bias, m, n, static_cast<int>(blockIdx.x) * __VA_ARGS__::ROWS, leaves});\
    }

// A tile of the pairs of one expert.
struct ExpertTile {
    int expert;
    // The expert's first pair.
    int first_pair;
    // 0 if the block has no tile.
    int pairs;
    // The tile's first row among the expert's pairs.
    int row0;
};

// The tile of `ROWS` rows with the block's number `blockIdx.x`. An expert has the pairs from `starts[expert]` on, up to
// the next one's, and as many tiles as they fill.
template <int ROWS>
__device__ __forceinline__ ExpertTile expert_tile(const uint32_t* starts, int experts) {
    const int lane = threadIdx.x % WARP, wanted = blockIdx.x;
    int before = 0;
    for (int expert0 = 0; expert0 < experts; expert0 += WARP) {
        const int expert = expert0 + lane;
        const int first = starts[min(expert, experts)], pairs = starts[min(expert + 1, experts)] - first;
        const int tiles = (pairs + ROWS - 1) / ROWS;
        int through = before + tiles;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int lower = __shfl_up_sync(ALL, through - before, distance);
            if (lane >= distance) through += lower;
        }
        const unsigned reached = __ballot_sync(ALL, wanted < through);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            const int tile = wanted - __shfl_sync(ALL, through - tiles, owner);
            return {expert0 + owner, __shfl_sync(ALL, first, owner), __shfl_sync(ALL, pairs, owner), tile * ROWS};
        }
        before = __shfl_sync(ALL, through, WARP - 1);
    }
    return {};
}

// A kernel that runs a tile's share of the products of experts: of the pairs of each, the rows of `x` and `out`, with
// its part of `w`, which has `n` outputs. The grid has as many blocks as there can be tiles.
#define EXPERT_KERNEL(NAME, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, __VA_ARGS__::MIN_BLOCKS)     \
        NAME(float* out, int64_t out_stride, const void* x, int64_t x_stride, int x_run, int x_values,\
             const void* w, int64_t w_stride, int w_run, int n, int leaves, const uint32_t* starts, int experts) {\
        using Tile = __VA_ARGS__;                                                                   \
        const ExpertTile tile = expert_tile<Tile::ROWS>(starts, experts);                           \
        if (tile.pairs == 0) return;                                                                \
        const int64_t w_row = static_cast<int64_t>(tile.expert) * Tile::HALVES * n;                 \
        Tile::run(Product{out + tile.first_pair * out_stride, out_stride, 0,                        \
                          static_cast<const Tile::Value*>(x) + tile.first_pair * x_stride, x_stride, x_run, x_values,\
                          static_cast<const Tile::Value*>(w) + w_row * w_stride, w_stride, w_run,   \
                          nullptr, tile.pairs, n, tile.row0, leaves});                              \
    }
