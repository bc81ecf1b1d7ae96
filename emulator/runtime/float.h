// Floating point. Halves are computed in double and rounded once.
static inline float F32(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 B32(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double F64(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 B64(double f) { u64 x; memcpy(&x, &f, 8); return x; }
static inline double F16(u16 x) { _Float16 f; memcpy(&f, &x, 2); return (float)f; }
static inline float BF16(u16 x) { return F32((u32)x << 16); }

// To odd: what is not exact gets an odd last bit, so that another rounding to fewer bits rounds as if it were the first.
static inline float odd_f32(double d) {
    const float f = (float)d;
    if ((double)f == d || isnan(d) || isinf(d) || B32(f) & 1) return f;
    const bool up = fabs(d) > fabs((double)f); // f may be infinite here: the largest finite number is odd
    return F32(up ? B32(f) + 1 : B32(f) - 1);
}
static inline double odd_add(double a, double b) {
    const double s = a + b;
    if (isnan(s) || isinf(s)) return s;
    const double part = s - a, error = (a - (s - part)) + (b - part);
    if (error == 0 || B64(s) & 1) return s;
    return F64((error > 0) == (s > 0) ? B64(s) + 1 : B64(s) - 1);
}
static inline double odd_u64(u64 x) { return x >> 53 ? (double)(x >> 11 | ((x & 2047) != 0)) * 2048 : (double)x; }
static inline double odd_s64(s64 x) { return x < 0 ? -odd_u64(-(u64)x) : odd_u64(x); }

static inline u16 round_f16(float f) { const _Float16 h = f; u16 x; memcpy(&x, &h, 2); return isnan(f) ? 0x7fff : x; }
static inline u16 round_bf16(float f) {
    const u32 x = B32(f);
    return isnan(f) ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
static inline u16 B16(double d) { return round_f16(odd_f32(d)); }
static inline u16 BB16(double d) { return round_bf16(odd_f32(d)); }
// A half rounded down (1), up (2) or to zero (3): the neighbour of the nearest one where that is on the other side.
static inline u16 directed_half(double d, u32 mode, bool is_bf16) {
    const u16 x = is_bf16 ? BB16(d) : B16(d);
    const double nearest = is_bf16 ? BF16(x) : F16(x);
    const bool down = mode == 1 || (mode == 3 && d > 0);
    if (down && nearest > d) return x >> 15 ? x + 1 : x - 1;
    if (!down && nearest < d) return x >> 15 ? x - 1 : x + 1;
    return x;
}
static inline float round_tf32_rna(float f) { return isfinite(f) ? F32((B32(f) + 0x1000) & ~0x1fffu) : f; }
static inline float round_tf32_rn(float f) { const u32 x = B32(f); return isfinite(f) ? F32((x + 0xfff + (x >> 13 & 1)) & ~0x1fffu) : f; }

static inline float ftz(float f) { return fabsf(f) < FLT_MIN ? copysignf(0.f, f) : f; }
static inline double sat(double f) { return f > 0 ? (f < 1 ? f : 1) : 0; }
static inline double relu(double f) { return f < 0 ? 0 : f; }

// The smaller and the larger one; of a number and not-a-number the number; -0 is below 0.
#define EXTREMES(type, min, max) \
    static inline type min(type a, type b) { return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b; } \
    static inline type max(type a, type b) { return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b; }
EXTREMES(float, min_f32, max_f32) EXTREMES(double, min_f64, max_f64)

// Operations rounded down (1), up (2) or to zero (3).
#define DIRECTED(name, type, from, expr) \
    static __attribute__((noinline)) type name(volatile from x, volatile from y, volatile from z, u32 mode) { \
        const u32 old = __builtin_ia32_stmxcsr(); \
        __builtin_ia32_ldmxcsr((old & ~0x6000u) | mode << 13); \
        volatile type r = expr; \
        __builtin_ia32_ldmxcsr(old); \
        return r; \
    }
DIRECTED(add_f32, float, float, x + y) DIRECTED(add_f64, double, double, x + y)
DIRECTED(sub_f32, float, float, x - y) DIRECTED(sub_f64, double, double, x - y)
DIRECTED(mul_f32, float, float, x * y) DIRECTED(mul_f64, double, double, x * y)
DIRECTED(div_f32, float, float, x / y) DIRECTED(div_f64, double, double, x / y)
DIRECTED(fma_f32, float, float, fmaf(x, y, z)) DIRECTED(fma_f64, double, double, fma(x, y, z))
DIRECTED(sqrt_f32, float, float, sqrtf(x)) DIRECTED(sqrt_f64, double, double, sqrt(x))
DIRECTED(f32_of_f64, float, double, (float)x)
DIRECTED(f32_of_s64, float, s64, (float)x) DIRECTED(f64_of_s64, double, s64, (double)x)
DIRECTED(f32_of_u64, float, u64, (float)x) DIRECTED(f64_of_u64, double, u64, (double)x)

// To an integer: to nearest even (0), to zero (1), down (2), up (3).
static inline double integral(double x, int mode) {
    return mode == 0 ? nearbyint(x) : mode == 1 ? trunc(x) : mode == 2 ? floor(x) : ceil(x);
}
static inline double to_int(double x, int mode, double lo, double hi, double nan) {
    if (isnan(x)) return nan;
    x = integral(x, mode);
    return x < lo ? lo : x > hi ? hi : x;
}
static inline s64 to_s64(double x, int mode) { x = to_int(x, mode, -0x1p63, 0x1p63, -0x1p63); return x >= 0x1p63 ? INT64_MAX : (s64)x; }
static inline u64 to_u64(double x, int mode) { x = to_int(x, mode, 0, 0x1p64, 0x1p63); return x >= 0x1p64 ? UINT64_MAX : (u64)x; }
