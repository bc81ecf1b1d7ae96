// The order in which the sums of leaves are added: a balanced binary tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
#pragma once

constexpr int MAX_LEAVES = 8;

// Adds the sums of leaves, `GROUPS` times four of each, as they become ready one after the other: those of a subtree
// wait here until its sibling is ready.
template <int GROUPS>
struct LeafSums {
    float waiting[3][GROUPS][4];

    // Takes the sums of leaf number `leaf`; makes them those of the whole tree if it is the last.
    __device__ __forceinline__ void add(int leaf, float (&sums)[GROUPS][4]) {
#pragma unroll
        for (int level = 0; level < 3; ++level) {
            const bool is_right = leaf >> level & 1;
#pragma unroll
            for (int i = 0; i < 4 * GROUPS; ++i) {
                float& waits = waiting[level][i / 4][i % 4];
                float& sum = sums[i / 4][i % 4];
                if (is_right) {
                    sum = waits + sum;
                } else {
                    waits = sum;
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
