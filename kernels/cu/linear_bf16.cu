// Linear layers on bfloat16 weights, by tensor cores.
//
// Every tile shape adds the products of an output in one order: 16 values of k an instruction, ascending within a leaf;
// then the leaves as a balanced tree; then the bias. So a row's bits do not depend on the shape that is chosen for the
// number of rows.

#include "leaves.cuh"
#include "linear.cuh"
#include "ptx.cuh"

// Values of k of one instruction.
constexpr int STEP = 16;
// Values of k of a stage of the pipeline: 128 bytes of a row.
constexpr int DEPTH = 64;
// Values of one asynchronous copy, and of one row of the matrices that a warp loads.
constexpr int CHUNK = 8;
constexpr int CHUNKS = DEPTH / CHUNK;

// A block's share of the product: `BM` rows by `BN` columns, by `WARPS_M` times `WARPS_N` warps, with `STAGES` stages
// of shared memory. `MANY_LEAVES` is whether blocks sum more than one leaf.
template <int BM, int BN, int WARPS_M, int WARPS_N, int STAGES, bool MANY_LEAVES>
struct Tile {
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
    // Blocks that a processor has at once at least: sums that wait need registers.
    static constexpr int MIN_BLOCKS = MANY_LEAVES ? 1 : 2;
    // Rows and columns of a warp.
    static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;
    // Instructions of a warp along rows and columns.
    static constexpr int MT = WM / 16, NT = WN / 8;
    // Chunks of a stage that a thread copies, and how many of them are of `x`.
    static constexpr int COPIES = (BM + BN) * CHUNKS / THREADS, X_COPIES = BM * CHUNKS / THREADS;
    static constexpr int STAGE_BYTES = (BM + BN) * DEPTH * sizeof(bf16);
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp loads matrices of 16 rows");
    static_assert(BM * CHUNKS % THREADS == 0 && BN * CHUNKS % THREADS == 0, "all threads copy as many chunks");

    // Address of a chunk of a stage in shared memory. Chunks of a row are exchanged by its number, so that the eight
    // rows of a matrix are in different banks.
    static __device__ __forceinline__ uint32_t place(uint32_t stage, int row, int chunk) {
        return stage + row * DEPTH * sizeof(bf16) + (chunk ^ row % CHUNKS) * CHUNK * sizeof(bf16);
    }

    // Copies stages from global to shared memory, in the order in which they are multiplied.
    struct Loader {
        const bf16* from[COPIES];
        bool valid[COPIES];
        uint32_t shared;
        // Where the next stage begins in a row, and in its run.
        int64_t at;
        int at_in_run;
        int run;
        int leaves;
        int stage;

        __device__ __forceinline__ Loader(const Product& p, uint32_t shared)
            : shared(shared), at(0), at_in_run(0), run(p.w_run), leaves(p.leaves), stage(0) {
            const int64_t first = static_cast<int64_t>(blockIdx.z) * p.leaves * p.w_run + threadIdx.x % CHUNKS * CHUNK;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const bool is_x = i < X_COPIES;
                const int in_tile = (threadIdx.x + i * THREADS) / CHUNKS - (is_x ? 0 : BM);
                const int row = in_tile + (is_x ? blockIdx.x * BM : blockIdx.y * BN);
                const bf16* base = static_cast<const bf16*>(is_x ? p.x : p.w) + first;
                valid[i] = row < (is_x ? p.m : p.n);
                from[i] = base + (valid[i] ? row * p.w_stride : 0);
            }
        }

        // Starts to copy the next stage, if there is one.
        __device__ __forceinline__ void next() {
            if (leaves > 0) {
                const int chunk = threadIdx.x % CHUNKS;
                const bool in_run = at_in_run + chunk * CHUNK < run;
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    const uint32_t to = place(shared + stage * STAGE_BYTES, (threadIdx.x + i * THREADS) / CHUNKS, chunk);
                    const bool copies = valid[i] && in_run;
                    copy_async_16(to, copies ? from[i] + at : from[i], copies);
                }
                const int step = min(DEPTH, run - at_in_run);
                at += step;
                at_in_run += step;
                if (at_in_run == run) {
                    at_in_run = 0;
                    --leaves;
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            commit_copies();
        }
    };

    // What a warp multiplies at once.
    struct Fragments {
        uint32_t x[MT][4], w[NT / 2][4];

        __device__ __forceinline__ void load(uint32_t stage, int step) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            const int x_row = warp / WARPS_N * WM + lane % 16, w_row = BM + warp % WARPS_N * WN + lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int i = 0; i < MT; ++i) load_matrices(x[i], place(stage, x_row + 16 * i, 2 * step + lane / 16));
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) load_matrices(w[i], place(stage, w_row + 16 * i, 2 * step + lane / 8 % 2));
        }

        __device__ __forceinline__ void multiply(float (&sums)[MT * NT][4]) const {
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    multiply_add(sums[i * NT + j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    };

    // Adds the products of a stage with `steps` steps.
    static __device__ __forceinline__ void multiply_stage(uint32_t stage, int steps, float (&sums)[MT * NT][4]) {
        if (steps < DEPTH / STEP) {
            Fragments fragments;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                fragments.load(stage, step);
                fragments.multiply(sums);
            }
            return;
        }
        // The next step is loaded while this one is multiplied.
        Fragments fragments[2];
        fragments[0].load(stage, 0);
#pragma unroll
        for (int step = 0; step < DEPTH / STEP; ++step) {
            if (step + 1 < DEPTH / STEP) fragments[(step + 1) % 2].load(stage, step + 1);
            fragments[step % 2].multiply(sums);
        }
    }

    // Writes sums, with the bias if there is one.
    static __device__ __forceinline__ void store(const Product& p, const float (&sums)[MT * NT][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row0 = blockIdx.x * BM + warp / WARPS_N * WM + lane / 4;
        const int column0 = blockIdx.y * BN + warp % WARPS_N * WN + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const int row = row0 + 8 * i;
            if (row >= p.m) return;
            float* out = p.out + blockIdx.z * p.out_part + row * p.out_stride;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const int column = column0 + 8 * j;
                float2 pair = {sums[i / 2 * NT + j][i % 2 * 2], sums[i / 2 * NT + j][i % 2 * 2 + 1]};
                if (p.bias && column < p.n) pair.x += p.bias[column];
                if (p.bias && column + 1 < p.n) pair.y += p.bias[column + 1];
                if (column + 1 < p.n && reinterpret_cast<uintptr_t>(out + column) % sizeof(float2) == 0) {
                    *reinterpret_cast<float2*>(out + column) = pair;
                } else {
                    if (column < p.n) out[column] = pair.x;
                    if (column + 1 < p.n) out[column + 1] = pair.y;
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const Product& p) {
        extern __shared__ __align__(128) uint8_t stages[];
        const uint32_t shared = shared_address(stages);
        float sums[MT * NT][4] = {};
        LeafSums<MT * NT> leaf_sums;
        Loader loader(p, shared);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) loader.next();
        int stage = 0;
        for (int leaf = 0; leaf < p.leaves; ++leaf) {
            for (int at = 0; at < p.w_run; at += DEPTH) {
                wait_for_copies<STAGES - 2>();
                // All threads see the stage, and have multiplied the one that is overwritten next.
                __syncthreads();
                loader.next();
                multiply_stage(shared + stage * STAGE_BYTES, min(DEPTH, p.w_run - at) / STEP, sums);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            if constexpr (MANY_LEAVES) {
                leaf_sums.add(leaf, sums);
                if (leaf + 1 < p.leaves) {
#pragma unroll
                    for (int i = 0; i < 4 * MT * NT; ++i) sums[i / 4][i % 4] = 0.0f;
                }
            }
        }
        store(p, sums);
    }
};

PRODUCT_KERNEL(bf16_16x32_leaf, Tile<16, 32, 1, 2, 8, false>)
PRODUCT_KERNEL(bf16_32x64_leaf, Tile<32, 64, 1, 4, 5, false>)
PRODUCT_KERNEL(bf16_64x64_leaf, Tile<64, 64, 2, 2, 4, false>)
PRODUCT_KERNEL(bf16_128x128_leaf, Tile<128, 128, 2, 4, 3, false>)
PRODUCT_KERNEL(bf16_16x32_leaves, Tile<16, 32, 1, 2, 8, true>)
PRODUCT_KERNEL(bf16_32x64_leaves, Tile<32, 64, 1, 4, 5, true>)
PRODUCT_KERNEL(bf16_64x64_leaves, Tile<64, 64, 2, 2, 4, true>)
PRODUCT_KERNEL(bf16_64x128_leaves, Tile<64, 128, 2, 4, 3, true>)
