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
constexpr int CHUNK_BYTES = CHUNK * sizeof(bf16), ROW_BYTES = DEPTH * sizeof(bf16);

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
    // Rows of `x`, then of `w`, whose chunks all threads copy at once; how often they do for a stage, and for its `x`.
    static constexpr int COPY_ROWS = THREADS / CHUNKS, COPIES = (BM + BN) / COPY_ROWS, X_COPIES = BM / COPY_ROWS;
    static constexpr int STAGE_BYTES = (BM + BN) * ROW_BYTES;
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp loads matrices of 16 rows");
    static_assert(BM % COPY_ROWS == 0 && BN % COPY_ROWS == 0, "all threads copy as many chunks");
    static_assert(COPY_ROWS % CHUNKS == 0, "chunks that a thread copies are exchanged alike");

    // Bytes from the start of a stage to a chunk of a row. Chunks of a row are exchanged by its number, so that the
    // eight rows of a matrix are in different banks.
    static __device__ __forceinline__ uint32_t place(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ row % CHUNKS) * CHUNK_BYTES;
    }

    // Copies stages from global to shared memory, in the order in which they are multiplied.
    struct Loader {
        // The next chunk of the first row of `x` and of `w` that this thread copies. Others follow every `COPY_ROWS` rows;
        // nothing is read at those that do not exist, which the bits of `exists` tell.
        const bf16 *x, *w;
        int64_t distance;
        uint32_t exists;
        // The first of these chunks in shared memory; the others follow at equal distances.
        uint32_t to;
        // The next stage, how many of its run's values come before it, and leaves from this one on.
        int stage, at, leaves;
        int run;

        __device__ __forceinline__ Loader(const Product& p, uint32_t shared)
            : distance(COPY_ROWS * p.w_stride), exists(0), stage(0), at(0), leaves(p.leaves), run(p.w_run) {
            const int row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
            const int x_row = blockIdx.x * BM + row0, w_row = blockIdx.y * BN + row0;
            const int64_t first = static_cast<int64_t>(blockIdx.z) * p.leaves * p.w_run + chunk * CHUNK;
            x = static_cast<const bf16*>(p.x) + x_row * p.x_stride + first;
            w = static_cast<const bf16*>(p.w) + w_row * p.w_stride + first;
            to = shared + place(row0, chunk);
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const bool is_x = i < X_COPIES;
                const int row = is_x ? x_row + i * COPY_ROWS : w_row + (i - X_COPIES) * COPY_ROWS;
                exists |= (row < (is_x ? p.m : p.n)) << i;
            }
        }

        // Starts to copy the next stage, if there is one.
        __device__ __forceinline__ void next() {
            if (leaves > 0) {
                const int values = min(DEPTH, run - at);
                const uint32_t copied = threadIdx.x % CHUNKS * CHUNK < values ? exists : 0;
#pragma unroll
                for (int i = 0; i < COPIES; ++i) {
                    const uint32_t place = to + stage * STAGE_BYTES + i * COPY_ROWS * ROW_BYTES;
                    const bf16* from = i < X_COPIES ? x + i * distance : w + (i - X_COPIES) * distance;
                    copy_async_16(place, from, copied >> i & 1);
                }
                x += values;
                w += values;
                at += values;
                if (at == run) {
                    at = 0;
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

        // Loads a step of a stage: `from_x` and `from_w` are the first matrices of its first step.
        __device__ __forceinline__ void load(uint32_t from_x, uint32_t from_w, int step) {
            // A step is two chunks, so its number makes two bits of the address, which are exchanged as in `place`.
            const uint32_t exchanged = step * 2 * CHUNK_BYTES;
#pragma unroll
            for (int i = 0; i < MT; ++i) load_matrices(x[i], (from_x ^ exchanged) + i * 16 * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) load_matrices(w[i], (from_w ^ exchanged) + i * 16 * ROW_BYTES);
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

    // Adds the products of a stage with `steps` steps, from its first matrices on.
    static __device__ __forceinline__ void multiply_stage(uint32_t x, uint32_t w, int steps, float (&sums)[MT * NT][4]) {
        if (steps < DEPTH / STEP) {
            Fragments fragments;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                fragments.load(x, w, step);
                fragments.multiply(sums);
            }
            return;
        }
        // The next step is loaded while this one is multiplied.
        Fragments fragments[2];
        fragments[0].load(x, w, 0);
#pragma unroll
        for (int step = 0; step < DEPTH / STEP; ++step) {
            if (step + 1 < DEPTH / STEP) fragments[(step + 1) % 2].load(x, w, step + 1);
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
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t x = shared + place(warp / WARPS_N * WM + lane % 16, lane / 16);
        const uint32_t w = shared + place(BM + warp % WARPS_N * WN + lane % 8 + lane / 16 * 8, lane / 8 % 2);
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
                const uint32_t offset = stage * STAGE_BYTES;
                multiply_stage(x + offset, w + offset, min(DEPTH, p.w_run - at) / STEP, sums);
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
