// One wrapper for each PTX instruction that CUDA C++ has no name for.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

// The address of shared memory as these instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts to copy 16 bytes of global memory, past the first-level cache; zeros in place of them if not `valid`, and
// nothing is read then. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes the group of the copies that this thread has started since the last group.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `LEFT` of this thread's groups of copies are under way. A barrier must follow before other
// threads read what was copied.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit values. Lane `l` gives the address of row `l % 8` of matrix `l / 8`, a multiple
// of 16, and gets values `2 (l % 4)` and `2 (l % 4) + 1` of row `l / 4` of each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// As [`load_matrices`], each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// `sum[16, 8] += a[16, 16] b[8, 16]^T` of a warp, bfloat16 to float32. Lane `l` has of `a` columns `2 (l % 4)` and the
// next: of row `l / 4`, of row `l / 4 + 8`, and of both 8 columns on; of `b` the same columns of row `l / 4`, and 8
// columns on; of the sums columns `2 (l % 4)` and the next of row `l / 4`, and of row `l / 4 + 8`.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
