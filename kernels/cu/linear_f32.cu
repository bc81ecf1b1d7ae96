// Linear layers on float32 weights, and LoRA factors.
//
// Every tile shape adds the products of an output in one order: a fused multiply-add each, with k ascending within a
// leaf; then the leaves as a balanced tree; then the bias.

#include "leaves.cuh"
#include "linear.cuh"

// Values of k of a stage; runs of the weights are padded to a multiple of it.
constexpr int DEPTH = 16;
// Fours of values of a row of a stage.
constexpr int FOURS = DEPTH / 4;

// A block's share of the product: `BM` rows by `BN` columns, of which a thread sums `TM` by 4.
template <int BM, int BN, int TM>
struct Tile {
    using Value = float;
    static constexpr int ROWS = BM, HALVES = 1, THREADS_N = BN / 4, THREADS = BM / TM * THREADS_N, MIN_BLOCKS = 2;
    // What a thread brings to a stage: values of `x`, and fours of values of `w`.
    static constexpr int X_VALUES = BM * DEPTH / THREADS, W_FOURS = BN * FOURS / THREADS;
    static_assert(THREADS % DEPTH == 0 && BM * DEPTH % THREADS == 0, "all threads bring as many values of whole rows");
    static_assert(BN * FOURS % THREADS == 0, "all threads bring as many fours");

    // Values by k; padding keeps what a warp stores in different banks.
    struct Stage {
        float x[DEPTH][BM + 4];
        float w[DEPTH][BN + 4];
    };

    // The values that a thread brings to a stage, on their way.
    struct Values {
        float x[X_VALUES];
        float4 w[W_FOURS];

        // Loads from `at` on in the runs of leaf number `leaf`.
        __device__ __forceinline__ void load(const Product& p, int leaf, int at) {
            const int x_row = p.row0 + threadIdx.x / DEPTH, x_at = at + threadIdx.x % DEPTH;
            const float* from_x = static_cast<const float*>(p.x) + x_row * p.x_stride + leaf * p.x_run + x_at;
#pragma unroll
            for (int i = 0; i < X_VALUES; ++i) {
                const int rows = i * (THREADS / DEPTH);
                x[i] = x_row + rows < p.m && x_at < p.x_values ? from_x[rows * p.x_stride] : 0.0f;
            }
            const int w_row = blockIdx.y * BN + threadIdx.x / FOURS, w_at = at + threadIdx.x % FOURS * 4;
            const float* from_w = static_cast<const float*>(p.w) + w_row * p.w_stride + leaf * p.w_run + w_at;
#pragma unroll
            for (int i = 0; i < W_FOURS; ++i) {
                const int rows = i * (THREADS / FOURS);
                w[i] = w_row + rows < p.n ? *reinterpret_cast<const float4*>(from_w + rows * p.w_stride) : float4{};
            }
        }

        __device__ __forceinline__ void store(Stage& stage) const {
#pragma unroll
            for (int i = 0; i < X_VALUES; ++i) {
                stage.x[threadIdx.x % DEPTH][threadIdx.x / DEPTH + i * (THREADS / DEPTH)] = x[i];
            }
#pragma unroll
            for (int i = 0; i < W_FOURS; ++i) {
                const int row = threadIdx.x / FOURS + i * (THREADS / FOURS), k = threadIdx.x % FOURS * 4;
                stage.w[k][row] = w[i].x;
                stage.w[k + 1][row] = w[i].y;
                stage.w[k + 2][row] = w[i].z;
                stage.w[k + 3][row] = w[i].w;
            }
        }
    };

    static __device__ __forceinline__ void multiply(const Stage& stage, float (&sums)[TM][4]) {
        const int row = threadIdx.x / THREADS_N * TM, column = threadIdx.x % THREADS_N * 4;
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float4 w = *reinterpret_cast<const float4*>(&stage.w[k][column]);
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const float x = stage.x[k][row + i];
                sums[i][0] = fmaf(x, w.x, sums[i][0]);
                sums[i][1] = fmaf(x, w.y, sums[i][1]);
                sums[i][2] = fmaf(x, w.z, sums[i][2]);
                sums[i][3] = fmaf(x, w.w, sums[i][3]);
            }
        }
    }

    // Writes sums, with the bias if there is one.
    static __device__ __forceinline__ void store(const Product& p, const float (&sums)[TM][4]) {
        const int row0 = p.row0 + threadIdx.x / THREADS_N * TM;
        const int column0 = blockIdx.y * BN + threadIdx.x % THREADS_N * 4;
#pragma unroll
        for (int i = 0; i < TM * 4; ++i) {
            const int row = row0 + i / 4, column = column0 + i % 4;
            if (row >= p.m || column >= p.n) continue;
            const float sum = sums[i / 4][i % 4];
            p.out[blockIdx.z * p.out_part + row * p.out_stride + column] = p.bias ? sum + p.bias[column] : sum;
        }
    }

    static __device__ __forceinline__ void run(const Product& p) {
        __shared__ __align__(16) Stage stages[2];
        float sums[TM][4] = {};
        LeafSums<TM> leaf_sums;
        const int first_leaf = blockIdx.z * p.leaves;
        Values values;
        values.load(p, first_leaf, 0);
        int stage = 0;
        for (int leaf = 0; leaf < p.leaves; ++leaf) {
            for (int at = 0; at < p.w_run; at += DEPTH) {
                // A thread that is here has multiplied the stage before the last, which is overwritten.
                values.store(stages[stage]);
                __syncthreads();
                const bool ends_leaf = at + DEPTH == p.w_run;
                if (!ends_leaf || leaf + 1 < p.leaves) {
                    values.load(p, first_leaf + leaf + ends_leaf, ends_leaf ? 0 : at + DEPTH);
                }
                multiply(stages[stage], sums);
                stage ^= 1;
            }
            leaf_sums.add(leaf, sums);
            if (leaf + 1 < p.leaves) {
#pragma unroll
                for (int i = 0; i < 4 * TM; ++i) sums[i / 4][i % 4] = 0.0f;
            }
        }
        store(p, sums);
    }
};

PRODUCT_KERNEL(f32_16x32, Tile<16, 32, 1>)
PRODUCT_KERNEL(f32_64x64, Tile<64, 64, 4>)

EXPERT_KERNEL(experts_f32_16x32, Tile<16, 32, 1>)
EXPERT_KERNEL(experts_f32_64x64, Tile<64, 64, 4>)
