// Matrix instructions of a whole warp. Lanes meet once for a batch of them; what a lane brings are words, of which `at`
// says which an instruction reads and writes.
typedef struct { Thread *t; u32 w[]; } Words;
static Words **whole_warp(void **slots, u32 mask) {
    if (mask != ~0u) fault(((Words *)slots[__builtin_ctz(mask)])->t, F_WARP, 0, 0);
    return (Words **)slots;
}

#define UNROLL _Pragma("GCC unroll 8") // -O1 does not by itself

// The rows of matrix i, whose addresses the lanes 8 i to 8 i + 7 bring in word `address`.
static void matrix_rows(Words **lanes, u32 line, u32 i, u32 address, u32 access, u8 *rows[8]) {
    for (u32 r = 0; r < 8; ++r) {
        Words *lane = lanes[i * 8 + r];
        lane->t->line = line;
        rows[r] = shared_at(lane->t, lane->w[address], 16, 16, access);
    }
}
// at: the address, then a word for each of n matrices of 8 x 8 halves.
static void ldmatrix(Words **lanes, u32 line, u32 n, bool trans, const u16 *at) {
    for (u32 i = 0; i < n; ++i) {
        u8 *rows[8];
        matrix_rows(lanes, line, i, at[0], READ, rows);
        const u32 to = at[1 + i];
        for (u32 g = 0; g < 8; ++g) {
            UNROLL for (u32 t = 0; t < 4; ++t) {
                u32 *d = &lanes[g * 4 + t]->w[to];
                if (trans) {
                    u16 low, high;
                    memcpy(&low, rows[t * 2] + g * 2, 2), memcpy(&high, rows[t * 2 + 1] + g * 2, 2);
                    *d = low | (u32)high << 16;
                } else {
                    memcpy(d, rows[g] + t * 4, 4);
                }
            }
        }
    }
}
static void stmatrix(Words **lanes, u32 line, u32 n, bool trans, const u16 *at) {
    for (u32 i = 0; i < n; ++i) {
        u8 *rows[8];
        matrix_rows(lanes, line, i, at[0], WRITE, rows);
        for (u32 l = 0; l < 32; ++l) {
            const u32 d = lanes[l]->w[at[1 + i]];
            if (trans) {
                const u16 low = d, high = d >> 16;
                memcpy(rows[l % 4 * 2] + l / 4 * 2, &low, 2), memcpy(rows[l % 4 * 2 + 1] + l / 4 * 2, &high, 2);
            } else {
                memcpy(rows[l / 4] + l % 4 * 4, &d, 4);
            }
        }
    }
}
// at: the result, then the source.
static void movmatrix(Words **lanes, const u16 *at) {
    u16 m[8][8];
    for (u32 l = 0; l < 32; ++l) memcpy(&m[l / 4][l % 4 * 2], &lanes[l]->w[at[1]], 4);
    for (u32 l = 0; l < 32; ++l) lanes[l]->w[at[0]] = m[l % 4 * 2][l / 4] | (u32)m[l % 4 * 2 + 1][l / 4] << 16;
}

// d[16 x 8] = a[16 x K] b[K x 8] + c, one float32 sum for each element, k ascending, each product exact. How tensor cores
// round inside is not documented. at: four words of d, then those of a, of b and four of c.
typedef u32 Row __attribute__((vector_size(32)));
typedef float Sums __attribute__((vector_size(32)));
enum { MMA_BF16, MMA_F16, MMA_TF32 };
#define TF32_BITS 0xffffe000u // the bits of a float32 that take part
// Two halves as the bits of float32, the lower half in the lower word.
static inline u64 mma_pair(u32 x, u32 type) {
    if (type == MMA_BF16) return (u64)(x & 0xffff0000u) << 32 | (u32)(x << 16);
    return (u64)B32(F16(x >> 16)) << 32 | B32(F16(x));
}
static inline __attribute__((always_inline)) void mma(Words **lanes, u32 K, u32 type, const u16 *at) {
    const u32 words_of_a = type == MMA_TF32 ? K / 2 : K / 4;
    const u16 *at_a = at + 4, *at_b = at_a + words_of_a, *at_c = at_b + words_of_a / 2;
    u32 a[16][16];
    union { u32 words[16][8]; Row row[16]; } b;
    union { u32 words[16][8]; Sums row[16]; } c;
    for (u32 l = 0; l < 32; ++l) {
        const u32 *w = lanes[l]->w, g = l / 4, t = l % 4;
        UNROLL for (u32 j = 0; j < words_of_a; ++j) { // rows g and g + 8 in turn, then the next columns
            if (type == MMA_TF32) {
                a[g + j % 2 * 8][t + j / 2 * 4] = w[at_a[j]] & TF32_BITS;
            } else {
                const u64 pair = mma_pair(w[at_a[j]], type);
                memcpy(&a[g + j % 2 * 8][t * 2 + j / 2 * 8], &pair, 8);
            }
        }
        UNROLL for (u32 j = 0; j < words_of_a / 2; ++j) {
            if (type == MMA_TF32) {
                b.words[t + j * 4][g] = w[at_b[j]] & TF32_BITS;
            } else {
                const u64 pair = mma_pair(w[at_b[j]], type);
                b.words[t * 2 + j * 8][g] = pair, b.words[t * 2 + j * 8 + 1][g] = pair >> 32;
            }
        }
        UNROLL for (u32 e = 0; e < 4; ++e) c.words[g + e / 2 * 8][t * 2 + e % 2] = w[at_c[e]];
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
    for (u32 l = 0; l < 32; ++l)
        UNROLL for (u32 e = 0; e < 4; ++e) lanes[l]->w[at[e]] = c.words[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2];
}
#define MMA(shape, K, name, type) static void mma_##shape##_##name(Words **lanes, const u16 *at) { mma(lanes, K, type, at); }
MMA(m16n8k16, 16, bf16, MMA_BF16) MMA(m16n8k8, 8, bf16, MMA_BF16)
MMA(m16n8k16, 16, f16, MMA_F16) MMA(m16n8k8, 8, f16, MMA_F16)
MMA(m16n8k8, 8, tf32, MMA_TF32) MMA(m16n8k4, 4, tf32, MMA_TF32)
