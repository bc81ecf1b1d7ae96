// Instructions of a warp: the lanes of a mask meet, and the last to come does the work of all.
#define EACH(l, mask) for (u32 l = 0; l < 32; ++l) if (mask >> l & 1)
#define MEET(mask, orders, fn, slot) T->b->rt->meet(T, mask, orders, fn, slot)

typedef struct { u32 a, b, c, d, mode, ok; } Shfl;
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
static void meet_shfl(void **slots, u32 mask) {
    EACH(l, mask) {
        Shfl *s = slots[l];
        const u32 b = s->b & 31, clamp_ = s->c & 31, segment = s->c >> 8 & 31;
        const u32 min = l & segment, max = min | (clamp_ & ~segment);
        s32 from = s->mode == SHFL_UP ? (s32)(l - b) : s->mode == SHFL_DOWN ? (s32)(l + b) : s->mode == SHFL_BFLY ? (s32)(l ^ b) : (s32)(min | (b & ~segment));
        s->ok = s->mode == SHFL_UP ? from >= (s32)max : from <= (s32)max;
        if (!s->ok) from = l;
        s->d = mask >> from & 1 ? ((Shfl *)slots[from])->a : POISON_U32; // of a lane that does not take part: undefined
    }
}
static inline u32 shfl(Thread *T, u32 mode, u32 a, u32 b, u32 c, u32 mask, u8 *ok) {
    Shfl s = {a, b, c, 0, mode, 0};
    MEET(mask, 0, meet_shfl, &s);
    *ok = s.ok;
    return s.d;
}

typedef struct { u64 value; u32 result; } Vote;
static void meet_ballot(void **slots, u32 mask) {
    u32 r = 0;
    EACH(l, mask) r |= (u32)(((Vote *)slots[l])->value != 0) << l;
    EACH(l, mask) ((Vote *)slots[l])->result = r;
}
static void meet_match_any(void **slots, u32 mask) {
    EACH(l, mask) {
        u32 r = 0;
        EACH(j, mask) r |= (u32)(((Vote *)slots[j])->value == ((Vote *)slots[l])->value) << j;
        ((Vote *)slots[l])->result = r;
    }
}
static void meet_match_all(void **slots, u32 mask) {
    const u64 first = ((Vote *)slots[__builtin_ctz(mask)])->value;
    u32 r = mask;
    EACH(l, mask) if (((Vote *)slots[l])->value != first) r = 0;
    EACH(l, mask) ((Vote *)slots[l])->result = r;
}
#define REDUX(name, type, expr) static void meet_##name(void **slots, u32 mask) { \
        bool first = true; type r = 0; \
        EACH(l, mask) { const type v = ((Vote *)slots[l])->value; r = first ? v : (expr); first = false; } \
        EACH(l, mask) ((Vote *)slots[l])->result = r; \
    }
REDUX(add_b32, u32, r + v) REDUX(and_b32, u32, r & v) REDUX(or_b32, u32, r | v) REDUX(xor_b32, u32, r ^ v)
REDUX(min_u32, u32, r < v ? r : v) REDUX(max_u32, u32, r > v ? r : v)
REDUX(min_s32, s32, r < v ? r : v) REDUX(max_s32, s32, r > v ? r : v)
static void meet_sync(void **slots, u32 mask) { (void)slots; (void)mask; }
static inline u32 vote(Thread *T, u64 value, u32 mask, Meet *fn) { Vote v = {value, 0}; MEET(mask, 0, fn, &v); return v.result; }
