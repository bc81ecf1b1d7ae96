// Linear layers on bfloat16 weights, by tensor cores.
//
// Every tile shape adds the products of an output in one order: 16 values of k an instruction, ascending within a leaf;
// then the leaves as a balanced tree; then the bias. So a row's bits do not depend on the shape that is chosen for the
// number of rows.

#include "activation.cuh"
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

// What blocks make of the sums of their leaves.
enum Kind {
    // They sum one leaf.
    LEAF,
    // They add several as a tree.
    LEAVES,
    // They sum one, and write the SiLU of the left half of the columns times the right half.
    GATED,
};

// A block's share of the product: `BM` rows by `BN` rows of the weights, by `WARPS_M` times `WARPS_N` warps, with
// `STAGES` stages of shared memory. If `GATED`, a warp has the same columns of both halves, one after the other; if
// `LEAVES`, the sums of `LEVELS` levels of the tree wait in registers, the others behind the stages.
template <int BM, int BN, int WARPS_M, int WARPS_N, int STAGES, Kind KIND, int LEVELS = 3>
struct Tile {
    using Value = bf16;
    static constexpr int ROWS = BM, THREADS = 32 * WARPS_M * WARPS_N;
    // Rows and columns of a warp.
    static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;
    // Instructions of a warp along rows and columns.
    static constexpr int MT = WM / 16, NT = WN / 8;
    // Blocks that a processor has at once at least: many sums need many registers.
    static constexpr int MIN_BLOCKS = KIND == LEAVES || MT * NT > 16 ? 1 : 2;
    // Columns of the output of a block and of a warp.
    static constexpr int HALVES = KIND == GATED ? 2 : 1, COLUMNS = BN / HALVES, WARP_COLUMNS = WN / HALVES;
    // Rows whose chunks all threads copy at once; how often they do for a stage's `x`, and for each half of its `w`.
    static constexpr int COPY_ROWS = THREADS / CHUNKS, X_COPIES = BM / COPY_ROWS, W_COPIES = COLUMNS / COPY_ROWS;
    static constexpr int STAGE_BYTES = (BM + BN) * ROW_BYTES;
    static_assert(WM % 16 == 0 && WN % 16 == 0, "a warp loads matrices of 16 rows");
    static_assert(BM % COPY_ROWS == 0 && COLUMNS % COPY_ROWS == 0, "all threads copy as many chunks");
    static_assert(COPY_ROWS % CHUNKS == 0, "chunks that a thread copies are exchanged alike");
    static_assert(KIND != GATED || COPY_ROWS % WARP_COLUMNS == 0, "chunks that a thread copies are at equal distances");

    // Bytes from the start of a stage to a chunk of a row. Chunks of a row are exchanged by its number, so that the
    // eight rows of a matrix are in different banks.
    static __device__ __forceinline__ uint32_t place(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ row % CHUNKS) * CHUNK_BYTES;
    }

    // Copies stages from global to shared memory, in the order in which they are multiplied.
    struct Loader {
        // The next chunk of the first row of `x` and of `w` that this thread copies. Others follow every `COPY_ROWS`
        // rows, as `x` is packed like `w`, and in the other half of `w`. Nothing is read at those that do not exist,
        // which the bits of `exists` tell.
        const bf16 *x, *w;
        int64_t distance, half;
        uint32_t exists;
        // Where the first of these chunks go in shared memory.
        uint32_t to_x, to_w;
        // The next stage, how many of its run's values come before it, and leaves from this one on.
        int stage, at, leaves;
        int run;

        __device__ __forceinline__ Loader(const Product& p, uint32_t shared)
            : distance(COPY_ROWS * p.w_stride), half(p.n * p.w_stride), exists(0), stage(0), at(0), leaves(p.leaves),
              run(p.w_run) {
            const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
            const int x_row = p.row0 + row, column = blockIdx.y * COLUMNS + row;
            const int64_t first = static_cast<int64_t>(blockIdx.z) * p.leaves * p.w_run + chunk * CHUNK;
            x = static_cast<const bf16*>(p.x) + x_row * p.x_stride + first;
            w = static_cast<const bf16*>(p.w) + column * p.w_stride + first;
            to_x = shared + place(row, chunk);
            to_w = shared + place(BM + row / WARP_COLUMNS * WN + row % WARP_COLUMNS, chunk);
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i) exists |= (x_row + i * COPY_ROWS < p.m) << i;
#pragma unroll
            for (int i = 0; i < W_COPIES; ++i) exists |= (column + i * COPY_ROWS < p.n) << (X_COPIES + i);
        }

        // Starts to copy the next stage, if there is one.
        __device__ __forceinline__ void next() {
            if (leaves > 0) {
                const int values = min(DEPTH, run - at);
                const uint32_t copied = threadIdx.x % CHUNKS * CHUNK < values ? exists : 0;
                const uint32_t offset = stage * STAGE_BYTES;
#pragma unroll
                for (int i = 0; i < X_COPIES; ++i) {
                    copy_async_16(to_x + offset + i * COPY_ROWS * ROW_BYTES, x + i * distance, copied >> i & 1);
                }
#pragma unroll
                for (int i = 0; i < HALVES * W_COPIES; ++i) {
                    const int part = i / W_COPIES, j = i % W_COPIES;
                    const uint32_t to = to_w + offset + (j * COPY_ROWS * HALVES + part * WARP_COLUMNS) * ROW_BYTES;
                    copy_async_16(to, w + j * distance + part * half, copied >> (X_COPIES + j) & 1);
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
    static __device__ __forceinline__ void multiply_stage(uint32_t x, uint32_t w, int steps,
                                                          float (&sums)[MT * NT][4]) {
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

    // The value for a column: its sum, with the bias if there is one, and gated by that of the other half.
    static __device__ __forceinline__ float value(const Product& p, int column, float sum, float other) {
        if (p.bias && column < p.n) {
            sum += p.bias[column];
            if (KIND == GATED) other += p.bias[p.n + column];
        }
        return KIND == GATED ? silu(sum) * other : sum;
    }

    static __device__ __forceinline__ void store(const Product& p, const float (&sums)[MT * NT][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row0 = p.row0 + warp / WARPS_N * WM + lane / 4;
        const int column0 = blockIdx.y * COLUMNS + warp % WARPS_N * WARP_COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const int row = row0 + 8 * i;
            if (row >= p.m) return;
            float* out = p.out + blockIdx.z * p.out_part + row * p.out_stride;
#pragma unroll
            for (int j = 0; j < NT / HALVES; ++j) {
                const int column = column0 + 8 * j, left = i % 2 * 2;
                const float(&sum)[4] = sums[i / 2 * NT + j];
                const float(&other)[4] = sums[i / 2 * NT + j + (HALVES - 1) * NT / 2];
                const float2 pair = {value(p, column, sum[left], other[left]),
                                     value(p, column + 1, sum[left + 1], other[left + 1])};
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
        LeafSums<MT * NT, LEVELS> leaf_sums;
        leaf_sums.shared = reinterpret_cast<float4*>(stages + STAGES * STAGE_BYTES);
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
            if constexpr (KIND == LEAVES) {
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

PRODUCT_KERNEL(bf16_16x32_leaf, Tile<16, 32, 1, 2, 8, LEAF>)
PRODUCT_KERNEL(bf16_32x64_leaf, Tile<32, 64, 1, 4, 5, LEAF>)
PRODUCT_KERNEL(bf16_64x64_leaf, Tile<64, 64, 2, 2, 4, LEAF>)
PRODUCT_KERNEL(bf16_128x128_leaf, Tile<128, 128, 2, 4, 3, LEAF>)
PRODUCT_KERNEL(bf16_128x256_leaf, Tile<128, 256, 2, 4, 3, LEAF>)
PRODUCT_KERNEL(bf16_16x32_leaves, Tile<16, 32, 1, 2, 8, LEAVES>)
PRODUCT_KERNEL(bf16_32x64_leaves, Tile<32, 64, 1, 4, 5, LEAVES>)
PRODUCT_KERNEL(bf16_64x64_leaves, Tile<64, 64, 2, 2, 4, LEAVES>)
PRODUCT_KERNEL(bf16_64x128_leaves, Tile<64, 128, 2, 4, 3, LEAVES>)
PRODUCT_KERNEL(bf16_128x128_leaves, Tile<128, 128, 2, 4, 3, LEAVES, 1>)
PRODUCT_KERNEL(bf16_16x16_gated, Tile<16, 32, 1, 2, 8, GATED>)
PRODUCT_KERNEL(bf16_32x32_gated, Tile<32, 64, 1, 4, 5, GATED>)
PRODUCT_KERNEL(bf16_64x32_gated, Tile<64, 64, 2, 2, 4, GATED>)
PRODUCT_KERNEL(bf16_128x64_gated, Tile<128, 128, 2, 4, 3, GATED>)
PRODUCT_KERNEL(bf16_128x128_gated, Tile<128, 256, 2, 4, 3, GATED>)

EXPERT_KERNEL(experts_bf16_16x32_leaf, Tile<16, 32, 1, 2, 8, LEAF>)
EXPERT_KERNEL(experts_bf16_32x64_leaf, Tile<32, 64, 1, 4, 5, LEAF>)
EXPERT_KERNEL(experts_bf16_64x64_leaf, Tile<64, 64, 2, 2, 4, LEAF>)
EXPERT_KERNEL(experts_bf16_128x128_leaf, Tile<128, 128, 2, 4, 3, LEAF>)
EXPERT_KERNEL(experts_bf16_128x256_leaf, Tile<128, 256, 2, 4, 3, LEAF>)
EXPERT_KERNEL(experts_bf16_16x16_gated, Tile<16, 32, 1, 2, 8, GATED>)
EXPERT_KERNEL(experts_bf16_32x32_gated, Tile<32, 64, 1, 4, 5, GATED>)
EXPERT_KERNEL(experts_bf16_64x32_gated, Tile<64, 64, 2, 2, 4, GATED>)
EXPERT_KERNEL(experts_bf16_128x64_gated, Tile<128, 128, 2, 4, 3, GATED>)
EXPERT_KERNEL(experts_bf16_128x128_gated, Tile<128, 256, 2, 4, 3, GATED>)
