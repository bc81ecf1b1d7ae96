// What products with bfloat16 and with float32 weights have in common.
#pragma once

#include <stdint.h>

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
                                 bias, m, n, leaves});                                              \
    }
