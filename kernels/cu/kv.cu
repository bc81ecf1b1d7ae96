// The cache of keys and values of a layer: `[blocks, kv_heads, block_size, head_dim]` each.

#include <cuda_bf16.h>
#include <stdint.h>

namespace {

// Slot of a row that nobody reads. NO_SLOT in src/cuda/step.rs.
constexpr uint32_t NO_SLOT = ~0u;

// Puts keys and values of a row, `[kv_heads * head_dim]`, into its slot, rounded to nearest even. A block for each row.
template <typename T>
__device__ __forceinline__ void write(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                                      const uint32_t* slots, T* keys, T* values, int kv_heads, int head_dim,
                                      int block_size) {
    const int64_t row = blockIdx.x;
    if (slots[row] == NO_SLOT) return;
    const int slot = slots[row], block = slot / block_size, in_block = slot % block_size;
    for (int column = threadIdx.x; column < kv_heads * head_dim; column += blockDim.x) {
        const int64_t head = static_cast<int64_t>(block) * kv_heads + column / head_dim;
        const int64_t at = (head * block_size + in_block) * head_dim + column % head_dim;
        keys[at] = static_cast<T>(k[row * k_stride + column]);
        values[at] = static_cast<T>(v[row * v_stride + column]);
    }
}

}  // namespace

extern "C" __global__ void write_kv_bf16(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                                         const uint32_t* slots, __nv_bfloat16* keys, __nv_bfloat16* values,
                                         int kv_heads, int head_dim, int block_size) {
    write(k, k_stride, v, v_stride, slots, keys, values, kv_heads, head_dim, block_size);
}

extern "C" __global__ void write_kv_f32(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                                        const uint32_t* slots, float* keys, float* values, int kv_heads, int head_dim,
                                        int block_size) {
    write(k, k_stride, v, v_stride, slots, keys, values, kv_heads, head_dim, block_size);
}

// A copy of the first tokens of a block. `copy_blocks` in src/cuda/attention/cache.rs.
struct BlockCopy {
    uint32_t from, to, tokens;
};

// Copies that do not touch each other's blocks. Block `x` of the grid is of copy `x`, block `y` of a KV head, block `z`
// of keys or values. Lengths are in chunks of 16 bytes: of a token of a head, and of all keys.
extern "C" __global__ void copy_blocks(uint4* cache, const BlockCopy* copies, int kv_heads, int block_size,
                                       int token_chunks, int64_t key_chunks) {
    const BlockCopy copy = copies[blockIdx.x];
    const int64_t head_chunks = static_cast<int64_t>(block_size) * token_chunks;
    uint4* heads = cache + blockIdx.z * key_chunks + blockIdx.y * head_chunks;
    const uint4* from = heads + copy.from * kv_heads * head_chunks;
    uint4* to = heads + copy.to * kv_heads * head_chunks;
    for (int i = threadIdx.x; i < static_cast<int>(copy.tokens) * token_chunks; i += blockDim.x) to[i] = from[i];
}
