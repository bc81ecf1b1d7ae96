// Integers and bits.
static inline s128 clamp(s128 x, s128 lo, s128 hi) { return x < lo ? lo : x > hi ? hi : x; }
static inline u64 shl(u64 a, u32 n, u32 bits) { return n >= bits ? 0 : a << n; }
static inline u64 shr_u(u64 a, u32 n, u32 bits) { return n >= bits ? 0 : a >> n; }
static inline s64 shr_s(s64 a, u32 n, u32 bits) { return a >> (n >= bits ? bits - 1 : n); }
static inline u64 low_bits(u32 n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
static inline u64 bfe_u(u64 a, u32 pos, u32 len, u32 bits) {
    pos &= 255; len &= 255;
    return pos >= bits ? 0 : a >> pos & low_bits(len);
}
static inline s64 bfe_s(s64 a, u32 pos, u32 len, u32 bits) {
    pos &= 255; len &= 255;
    if (!len) return 0;
    const u32 msb = pos + len - 1 < bits - 1 ? pos + len - 1 : bits - 1;
    const bool sign = a >> msb & 1;
    if (pos >= bits) return -(s64)sign;
    const u64 field = low_bits(msb - pos + 1), v = (u64)a >> pos & field;
    return sign ? (s64)(v | ~field) : (s64)v;
}
static inline u64 bfi(u64 a, u64 b, u32 pos, u32 len, u32 bits) {
    pos &= 255; len &= 255;
    if (!len || pos >= bits) return b;
    const u64 m = low_bits(len) << pos;
    return (b & ~m) | (a << pos & m);
}
static inline u32 prmt(u32 a, u32 b, u32 selectors) {
    const u64 v = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 s = selectors >> 4 * i & 15;
        u8 x = v >> 8 * (s & 7);
        if (s & 8) x = x & 0x80 ? 0xff : 0;
        r |= (u32)x << 8 * i;
    }
    return r;
}
static inline u32 clz(u64 a, u32 bits) { return a ? __builtin_clzll(a) - (64 - bits) : bits; }
static inline u64 brev(u64 a, u32 bits) {
    u64 r = 0;
    for (u32 i = 0; i < bits; ++i) r |= (a >> i & 1) << (bits - 1 - i);
    return r;
}
// Where the highest bit is that is not the sign.
static inline u32 bfind(s64 a, bool is_signed, bool shift_amount, u32 bits) {
    const u64 v = (is_signed && a < 0 ? ~a : a) & low_bits(bits);
    if (!v) return ~0u;
    const u32 at = 63 - __builtin_clzll(v);
    return shift_amount ? bits - 1 - at : at;
}
static inline u32 shf_l(u32 a, u32 b, u32 n) { return (((u64)b << 32 | a) << n) >> 32; }
static inline u32 shf_r(u32 a, u32 b, u32 n) { return ((u64)b << 32 | a) >> n; }
static inline u32 dp4a(u32 a, u32 b, u32 c, bool signed_a, bool signed_b) {
    for (int i = 0; i < 4; ++i) {
        const s32 x = signed_a ? (s32)(s8)(a >> 8 * i) : (s32)(u8)(a >> 8 * i);
        const s32 y = signed_b ? (s32)(s8)(b >> 8 * i) : (s32)(u8)(b >> 8 * i);
        c += x * y;
    }
    return c;
}
