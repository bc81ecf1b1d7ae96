// Checked accesses to memory.
#define DEVICE 1ull // the windows of the address space, address >> 44
#define STORE 2ull  // where the emulator keeps the bytes of DEVICE addresses
#define PINNED 3ull
#define SHARED 4ull
#define LOCAL 5ull

static inline u8 *shared_at(Thread *T, u64 a, u32 n, u32 align, u32 access) {
    if (__builtin_expect(a % align != 0, 0)) fault(T, F_ALIGN, a, n);
    if (__builtin_expect((u64)(u32)a + n > T->b->shared_size, 0)) fault(T, F_SHARED, a, n);
#ifdef RACE
    T->b->rt->race(T, (u32)a, n, access);
#endif
    return T->b->shared + (u32)a;
}

static COLD u8 *other_at(Thread *T, u64 a, u32 n, u32 align, u32 access) {
    if (a >> 44 == SHARED) return shared_at(T, (u32)a, n, align, access);
    if (a >> 44 != LOCAL && !T->b->rt->host(a, n)) fault(T, F_ADDRESS, a, n);
    return (u8 *)a;
}

static inline u8 *global_at(Thread *T, u64 a, u32 n, u32 align, u32 access) {
    if (__builtin_expect(a % align != 0, 0)) fault(T, F_ALIGN, a, n);
    if (__builtin_expect(a >> 44 != DEVICE, 0)) return other_at(T, a, n, align, access);
    const u64 at = a & ((1ull << 44) - 1);
    if (__builtin_expect((at & 4095) + n > T->b->limits[at >> 12], 0)) fault(T, F_ADDRESS, a, n);
    return (u8 *)(a + (1ull << 44));
}

static inline u8 *local_at(Thread *T, u64 a, u32 n, u32 align, u32 access) {
    if (__builtin_expect(a % align != 0, 0)) fault(T, F_ALIGN, a, n);
    if (__builtin_expect(a >> 44 != LOCAL, 0)) fault(T, F_LOCAL, a, n);
    return (u8 *)a;
}

static inline void copy_async(Thread *T, u32 to, u64 from, u32 bytes, u32 valid) {
    if (valid > bytes) valid = bytes;
    if (valid) global_at(T, from, valid, 1, READ);
    T->b->rt->copy_async(T, to, from, bytes, valid);
}
