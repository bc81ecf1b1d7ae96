// mbarriers. The state is one word of shared memory: from the lowest bit, 20 bits of arrivals that the phase still waits
// for, 20 of arrivals that each phase waits for, 21 of bytes that the phase still waits for, the phase's parity, and 2 that
// tell a barrier that was initialised from other memory.
typedef struct { u32 pending, expected; s32 bytes; bool parity; } Mbarrier;
#define MBARRIER_MARK 2ull
static u64 mbarrier_word(Mbarrier m) {
    return MBARRIER_MARK << 62 | (u64)m.parity << 61 | (u64)(m.bytes & 0x1fffff) << 40 | (u64)m.expected << 20 | m.pending;
}
static Mbarrier mbarrier_of(u64 w) {
    return (Mbarrier){w & 0xfffff, w >> 20 & 0xfffff, (s32)(w >> 40 << 11) >> 11, w >> 61 & 1};
}
static u64 *mbarrier_at(Thread *T, u64 a) {
    u64 *w = (u64 *)shared_at(T, a, 8, 8, ATOMIC);
    if (*w >> 62 != MBARRIER_MARK) fault(T, F_MBARRIER, a, 8);
    return w;
}
static void mbarrier_init(Thread *T, u64 a, u32 count) {
    if (count == 0 || count >> 20) fault(T, F_MBARRIER, a, 8);
    *(u64 *)shared_at(T, a, 8, 8, ATOMIC) = mbarrier_word((Mbarrier){count, count, 0, 0});
}
static void mbarrier_inval(Thread *T, u64 a) { *mbarrier_at(T, a) = POISON_U64; }
// Bytes are expected (or, below 0, have come), `count` threads arrive, and `drop` of them for the last time.
static u64 mbarrier_update(Thread *T, u64 a, s32 bytes, u32 count, u32 drop) {
    u64 *w = mbarrier_at(T, a);
    const u64 old = *w;
    Mbarrier m = mbarrier_of(old);
    if (count > m.pending || drop > m.expected) fault(T, F_MBARRIER, a, 8);
    m.bytes += bytes, m.pending -= count, m.expected -= drop;
    if (m.pending == 0 && m.bytes == 0) {
        m.parity = !m.parity, m.pending = m.expected;
        T->b->rt->ordered(T);
    }
    *w = mbarrier_word(m);
    return old;
}
static bool mbarrier_passed(Thread *T, u64 a, bool parity) {
    if (mbarrier_of(*mbarrier_at(T, a)).parity != parity) return true;
    T->b->rt->pause(T);
    return mbarrier_of(*mbarrier_at(T, a)).parity != parity;
}
// The thread's earlier copies come before it arrives; without `noinc` the phase waits for one arrival more.
static void mbarrier_copies(Thread *T, u64 a, bool noinc) {
    T->b->rt->copy_wait(T, 0);
    if (noinc) mbarrier_update(T, a, 0, 1, 0); else mbarrier_at(T, a);
}
