// The order in which the sums of leaves are added: a balanced binary tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
#pragma once

constexpr int MAX_LEAVES = 8;

// Adds the sums of leaves, `GROUPS` times four of each, as they become ready one after the other: those of a subtree
// wait until its sibling is ready. The lowest `LEVELS` of the three levels of the tree wait in registers.
template <int GROUPS, int LEVELS = 3>
struct LeafSums {
    // Of shared memory that the others wait in.
    static constexpr int BYTES_PER_THREAD = (3 - LEVELS) * GROUPS * sizeof(float4);

    float4 registers[LEVELS][GROUPS];
    float4* shared;

    // Where sums of a level wait. Neighbours in a warp have neighbouring places of shared memory.
    __device__ __forceinline__ float4& waiting(int level, int group) {
        if (level < LEVELS) return registers[level][group];
        return shared[((level - LEVELS) * GROUPS + group) * blockDim.x + threadIdx.x];
    }

    // Takes the sums of leaf number `leaf`; makes them those of the whole tree if it is the last.
    __device__ __forceinline__ void add(int leaf, float (&sums)[GROUPS][4]) {
#pragma unroll
        for (int level = 0; level < 3; ++level) {
            const bool is_right = leaf >> level & 1;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                float(&sum)[4] = sums[i];
                float4& waits = waiting(level, i);
                if (is_right) {
                    const float4 left = waits;
                    sum[0] = left.x + sum[0];
                    sum[1] = left.y + sum[1];
                    sum[2] = left.z + sum[2];
                    sum[3] = left.w + sum[3];
                } else {
                    waits = float4{sum[0], sum[1], sum[2], sum[3]};
                }
            }
            if (!is_right) return;
        }
    }
};

// The sum of `count` leaves, a power of two; the others are not read.
__device__ __forceinline__ float sum_leaves(float (&leaves)[MAX_LEAVES], int count) {
#pragma unroll
    for (int distance = 1; distance < MAX_LEAVES; distance *= 2) {
#pragma unroll
        for (int i = 0; i < MAX_LEAVES; i += 2 * distance) {
            if (i + distance < count) leaves[i] += leaves[i + distance];
        }
    }
    return leaves[0];
}
