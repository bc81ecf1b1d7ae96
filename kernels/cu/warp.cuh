// Reductions over the lanes of a warp.
#pragma once

constexpr unsigned ALL = 0xffffffff;
constexpr int WARP = 32;

// The sum over the lanes of a warp, in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
    return x;
}
