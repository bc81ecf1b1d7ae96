// Matrix instructions of a whole warp.
typedef struct { Thread *t; u32 d[4]; u64 a; u32 n, trans; } Rows; // 8 x 8 matrices of halves and the addresses of their rows
static void whole_warp(Thread *T, u32 mask) { if (mask != ~0u) fault(T, F_WARP, 0, 0); }
static void meet_ldmatrix(void **slots, u32 mask) {
    Rows *first = slots[__builtin_ctz(mask)];
    whole_warp(first->t, mask);
    for (u32 i = 0; i < first->n; ++i) {
        u16 m[8][8];
        for (u32 r = 0; r < 8; ++r) {
            Rows *s = slots[i * 8 + r];
            memcpy(m[r], shared_at(s->t, s->a, 16, 16, READ), 16);
        }
        for (u32 l = 0; l < 32; ++l) {
            const u32 r = l / 4, c = l % 4 * 2;
            ((Rows *)slots[l])->d[i] = first->trans ? m[c][r] | (u32)m[c + 1][r] << 16 : m[r][c] | (u32)m[r][c + 1] << 16;
        }
    }
}
static void meet_stmatrix(void **slots, u32 mask) {
    Rows *first = slots[__builtin_ctz(mask)];
    whole_warp(first->t, mask);
    for (u32 i = 0; i < first->n; ++i) {
        u16 m[8][8];
        for (u32 l = 0; l < 32; ++l) {
            const u32 r = l / 4, c = l % 4 * 2, d = ((Rows *)slots[l])->d[i];
            if (first->trans) m[c][r] = d, m[c + 1][r] = d >> 16; else m[r][c] = d, m[r][c + 1] = d >> 16;
        }
        for (u32 r = 0; r < 8; ++r) {
            Rows *s = slots[i * 8 + r];
            memcpy(shared_at(s->t, s->a, 16, 16, WRITE), m[r], 16);
        }
    }
}
static void meet_movmatrix(void **slots, u32 mask) {
    whole_warp(((Rows *)slots[__builtin_ctz(mask)])->t, mask);
    u16 m[8][8];
    for (u32 l = 0; l < 32; ++l) {
        const u32 d = ((Rows *)slots[l])->d[0];
        m[l / 4][l % 4 * 2] = d, m[l / 4][l % 4 * 2 + 1] = d >> 16;
    }
    for (u32 l = 0; l < 32; ++l) ((Rows *)slots[l])->d[0] = m[l % 4 * 2][l / 4] | (u32)m[l % 4 * 2 + 1][l / 4] << 16;
}

// d[16 x 8] = a[16 x K] b[K x 8] + c, one float32 sum for each element, k ascending, each product exact. How tensor cores
// round inside is not documented.
typedef struct { Thread *t; u32 a[4], b[2], c[4], d[4]; } Mma;
typedef float Row __attribute__((vector_size(32)));
enum { MMA_BF16, MMA_F16, MMA_TF32 };
static inline float mma_half(u32 x, u32 i, u32 type) { const u16 h = x >> 16 * i; return type == MMA_BF16 ? BF16(h) : (float)F16(h); }
static inline __attribute__((always_inline)) void mma(void **slots, u32 mask, u32 K, u32 type) {
    whole_warp(((Mma *)slots[__builtin_ctz(mask)])->t, mask);
    float a[16][16], b[16][8] __attribute__((aligned(32))), c[16][8] __attribute__((aligned(32)));
    for (u32 l = 0; l < 32; ++l) {
        const Mma *s = slots[l];
        const u32 row = l / 4, at = l % 4;
        if (type == MMA_TF32) { // the low 13 bits do not take part
            for (u32 j = 0; j < K / 2; ++j) a[row + j % 2 * 8][at + j / 2 * 4] = F32(s->a[j] & ~0x1fffu);
            for (u32 j = 0; j < K / 4; ++j) b[at + j * 4][row] = F32(s->b[j] & ~0x1fffu);
        } else {
            for (u32 j = 0; j < K / 4; ++j)
                for (u32 h = 0; h < 2; ++h) a[row + j % 2 * 8][j / 2 * 8 + at * 2 + h] = mma_half(s->a[j], h, type);
            for (u32 j = 0; j < K / 8; ++j)
                for (u32 h = 0; h < 2; ++h) b[j * 8 + at * 2 + h][row] = mma_half(s->b[j], h, type);
        }
        for (u32 e = 0; e < 4; ++e) c[row + e / 2 * 8][at * 2 + e % 2] = F32(s->c[e]);
    }
    for (u32 r = 0; r < 16; r += 4) { // four sums at a time, to hide the latency of each
        Row s0 = *(Row *)c[r], s1 = *(Row *)c[r + 1], s2 = *(Row *)c[r + 2], s3 = *(Row *)c[r + 3];
        for (u32 k = 0; k < K; ++k) {
            const Row x = *(Row *)b[k];
            s0 += a[r][k] * x, s1 += a[r + 1][k] * x, s2 += a[r + 2][k] * x, s3 += a[r + 3][k] * x;
        }
        *(Row *)c[r] = s0, *(Row *)c[r + 1] = s1, *(Row *)c[r + 2] = s2, *(Row *)c[r + 3] = s3;
    }
    for (u32 l = 0; l < 32; ++l)
        for (u32 e = 0; e < 4; ++e) ((Mma *)slots[l])->d[e] = B32(c[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2]);
}
#define MMA(shape, K, name, type) static void meet_mma_##shape##_##name(void **slots, u32 mask) { mma(slots, mask, K, type); }
MMA(m16n8k16, 16, bf16, MMA_BF16) MMA(m16n8k8, 8, bf16, MMA_BF16)
MMA(m16n8k16, 16, f16, MMA_F16) MMA(m16n8k8, 8, f16, MMA_F16)
MMA(m16n8k8, 8, tf32, MMA_TF32) MMA(m16n8k4, 4, tf32, MMA_TF32)
