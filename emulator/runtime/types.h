// What the C that is made of a PTX function stands on. A PTX register is an unsigned integer of its width.
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef unsigned __int128 u128;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64; typedef __int128 s128;

typedef struct Thread Thread;
// Does the work of a whole warp when the lanes of `mask` have met; slots[lane] is what the lane brought.
typedef void Meet(void **slots, u32 mask);

// What exec.rs gives to kernels.
typedef struct {
    void (*fault)(Thread *, u32 kind, u64 address, u32 bytes);
    u32 (*barrier)(Thread *, u32 id, u32 count, u32 op, u32 value);
    void (*meet)(Thread *, u32 mask, u32 orders, Meet *, void *slot);
    void (*copy_async)(Thread *, u32 to, u64 from, u32 bytes, u32 valid);
    void (*copy_commit)(Thread *);
    void (*copy_wait)(Thread *, u32 left);
    void (*race)(Thread *, u32 at, u32 bytes, u32 access);
    u64 (*host)(u64 address, u32 bytes);                // is this page-locked host memory?
    void (*pause)(Thread *);                            // lets the other threads of the block run
    void (*print)(Thread *, u64 format, u64 arguments); // printf
    void (*ordered)(Thread *);                          // accesses before a phase of an mbarrier are ordered before those after it
} Runtime;

typedef struct {
    u32 ctaid[3], ntid[3], nctaid[3], shared_size;
    u8 *shared;
    const u64 *globals;
    const u16 *limits; // of each page of device memory: how many of its bytes are allocated
    const Runtime *rt;
} Block;

struct Thread { u32 tid[3], lane, warp, line; Block *b; };

enum { F_ADDRESS = 1, F_ALIGN, F_SHARED, F_TRAP, F_ASSERT, F_WARP, F_MBARRIER, F_LOCAL };
enum { READ, WRITE, ATOMIC, STRONG_READ }; // the kinds of access that the race check knows

#define COLD __attribute__((cold, noinline))
static COLD void fault(Thread *T, u32 kind, u64 a, u32 n) { T->b->rt->fault(T, kind, a, n); __builtin_unreachable(); }

// What a register or local memory holds before it is written: not a number, in each width.
#define POISON_U8 0
#define POISON_U16 0x7fff
#define POISON_U32 0x7fff7fffu
#define POISON_U64 0x7fff7fff7fff7fffull
#define POISON_U128 ((u128)POISON_U64 << 64 | POISON_U64)

static inline u64 nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000u + t.tv_nsec;
}
