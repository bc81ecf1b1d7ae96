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
typedef u32 Row __attribute__((vector_size(32)));
typedef float Sums __attribute__((vector_size(32)));
enum { MMA_BF16, MMA_F16, MMA_TF32 };
// Two halves as float32 bits, the lower half in the lower word; and the 19 bits of tf32 that take part.
static inline u64 mma_pair(u32 x, u32 type) {
    if (type == MMA_BF16) return (u64)(x & 0xffff0000u) << 32 | (u32)(x << 16);
    return (u64)B32(F16(x >> 16)) << 32 | B32(F16(x));
}
static inline __attribute__((always_inline)) void mma(void **slots, u32 mask, u32 K, u32 type) {
    whole_warp(((Mma *)slots[__builtin_ctz(mask)])->t, mask);
    u32 a[16][16];
    union { u32 words[16][8]; Row row[16]; } b;
    union { u32 words[16][8]; Sums row[16]; } c;
    for (u32 l = 0; l < 32; ++l) {
        const Mma *s = slots[l];
        const u32 row = l / 4, at = l % 4;
        if (type == MMA_TF32) {
            a[row][at] = s->a[0] & ~0x1fffu, a[row + 8][at] = s->a[1] & ~0x1fffu, b.words[at][row] = s->b[0] & ~0x1fffu;
            if (K == 8) a[row][at + 4] = s->a[2] & ~0x1fffu, a[row + 8][at + 4] = s->a[3] & ~0x1fffu, b.words[at + 4][row] = s->b[1] & ~0x1fffu;
        } else {
            const u64 a0 = mma_pair(s->a[0], type), a1 = mma_pair(s->a[1], type), b0 = mma_pair(s->b[0], type);
            memcpy(&a[row][at * 2], &a0, 8), memcpy(&a[row + 8][at * 2], &a1, 8);
            b.words[at * 2][row] = b0, b.words[at * 2 + 1][row] = b0 >> 32;
            if (K == 16) {
                const u64 a2 = mma_pair(s->a[2], type), a3 = mma_pair(s->a[3], type), b1 = mma_pair(s->b[1], type);
                memcpy(&a[row][at * 2 + 8], &a2, 8), memcpy(&a[row + 8][at * 2 + 8], &a3, 8);
                b.words[at * 2 + 8][row] = b1, b.words[at * 2 + 9][row] = b1 >> 32;
            }
        }
        memcpy(&c.words[row][at * 2], s->c, 8), memcpy(&c.words[row + 8][at * 2], s->c + 2, 8);
    }
    for (u32 r = 0; r < 16; r += 8) { // eight sums at a time hide the latency of each
        Sums s0 = c.row[r], s1 = c.row[r + 1], s2 = c.row[r + 2], s3 = c.row[r + 3];
        Sums s4 = c.row[r + 4], s5 = c.row[r + 5], s6 = c.row[r + 6], s7 = c.row[r + 7];
        for (u32 k = 0; k < K; ++k) {
            const Sums x = (Sums)b.row[k];
            s0 += F32(a[r][k]) * x, s1 += F32(a[r + 1][k]) * x, s2 += F32(a[r + 2][k]) * x, s3 += F32(a[r + 3][k]) * x;
            s4 += F32(a[r + 4][k]) * x, s5 += F32(a[r + 5][k]) * x, s6 += F32(a[r + 6][k]) * x, s7 += F32(a[r + 7][k]) * x;
        }
        c.row[r] = s0, c.row[r + 1] = s1, c.row[r + 2] = s2, c.row[r + 3] = s3;
        c.row[r + 4] = s4, c.row[r + 5] = s5, c.row[r + 6] = s6, c.row[r + 7] = s7;
    }
    for (u32 l = 0; l < 32; ++l) {
        Mma *s = slots[l];
        memcpy(s->d, &c.words[l / 4][l % 4 * 2], 8), memcpy(s->d + 2, &c.words[l / 4 + 8][l % 4 * 2], 8);
    }
}
#define MMA(shape, K, name, type) static void meet_mma_##shape##_##name(void **slots, u32 mask) { mma(slots, mask, K, type); }
MMA(m16n8k16, 16, bf16, MMA_BF16) MMA(m16n8k8, 8, bf16, MMA_BF16)
MMA(m16n8k16, 16, f16, MMA_F16) MMA(m16n8k8, 8, f16, MMA_F16)
MMA(m16n8k8, 8, tf32, MMA_TF32) MMA(m16n8k4, 4, tf32, MMA_TF32)
