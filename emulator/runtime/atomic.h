// Atomics: other threads of the emulator may run other blocks of the same launch.
#define ATOMIC_OP(name, type, bits, expr) static inline u##bits atom_##name(u8 *p, u##bits raw) { \
        u##bits old = __atomic_load_n((u##bits *)p, __ATOMIC_RELAXED), fresh; \
        do { \
            type o, v, r; \
            memcpy(&o, &old, sizeof o); memcpy(&v, &raw, sizeof v); \
            r = (expr); \
            memcpy(&fresh, &r, sizeof fresh); \
        } while (!__atomic_compare_exchange_n((u##bits *)p, &old, fresh, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
        return old; \
    }
#define COMPARE_AND_SWAP(bits) static inline u##bits atom_cas_b##bits(u8 *p, u##bits compare, u##bits value) { \
        __atomic_compare_exchange_n((u##bits *)p, &compare, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        return compare; \
    }
#define ATOMICS(bits) \
    ATOMIC_OP(add_u##bits, u##bits, bits, o + v) ATOMIC_OP(add_s##bits, u##bits, bits, o + v) \
    ATOMIC_OP(exch_b##bits, u##bits, bits, v) ATOMIC_OP(and_b##bits, u##bits, bits, o & v) \
    ATOMIC_OP(or_b##bits, u##bits, bits, o | v) ATOMIC_OP(xor_b##bits, u##bits, bits, o ^ v) \
    ATOMIC_OP(min_u##bits, u##bits, bits, o < v ? o : v) ATOMIC_OP(max_u##bits, u##bits, bits, o > v ? o : v) \
    ATOMIC_OP(min_s##bits, s##bits, bits, o < v ? o : v) ATOMIC_OP(max_s##bits, s##bits, bits, o > v ? o : v) \
    ATOMIC_OP(inc_u##bits, u##bits, bits, o >= v ? 0 : o + 1) ATOMIC_OP(dec_u##bits, u##bits, bits, o == 0 || o > v ? v : o - 1)
ATOMICS(32) ATOMICS(64) COMPARE_AND_SWAP(16) COMPARE_AND_SWAP(32) COMPARE_AND_SWAP(64)
static inline u32 add_f16x2(u32 a, u32 b) { return B16(odd_add(F16(a), F16(b))) | (u32)B16(odd_add(F16(a >> 16), F16(b >> 16))) << 16; }
static inline u32 add_bf16x2(u32 a, u32 b) { return BB16(odd_add(BF16(a), BF16(b))) | (u32)BB16(odd_add(BF16(a >> 16), BF16(b >> 16))) << 16; }
ATOMIC_OP(add_f32, float, 32, o + v) ATOMIC_OP(add_f64, double, 64, o + v)
ATOMIC_OP(add_f16, u16, 16, B16(odd_add(F16(o), F16(v)))) ATOMIC_OP(add_bf16, u16, 16, BB16(odd_add(BF16(o), BF16(v))))
ATOMIC_OP(add_f16x2, u32, 32, add_f16x2(o, v)) ATOMIC_OP(add_bf16x2, u32, 32, add_bf16x2(o, v))
