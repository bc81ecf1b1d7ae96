// Weights as matrices hold them: where they lie, and how they are rounded.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

// A bfloat16 by its bits, which a copy keeps even where they are a NaN's.
struct Bf16 {
    uint16_t bits;
};

// An IEEE half by its bits.
struct F16 {
    uint16_t bits;
};

// Where the value of a column lies in a row whose runs of `run` values are `padded_run` apart.
__device__ __forceinline__ int place(int column, int run, int padded_run) {
    return column / run * padded_run + column % run;
}

__device__ __forceinline__ float widen(Bf16 x) {
    return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ __forceinline__ float widen(F16 x) {
    return __half2float(__ushort_as_half(x.bits));
}

__device__ __forceinline__ float widen(float x) {
    return x;
}

template <typename T>
__device__ T rounded(float x);

// To nearest even; a NaN stays one, with the bits that the CPU gives it.
template <>
__device__ __forceinline__ Bf16 rounded<Bf16>(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return {static_cast<uint16_t>(isnan(x) ? quiet : nearest)};
}

template <>
__device__ __forceinline__ float rounded<float>(float x) {
    return x;
}
