// The names of ``warp.cuh`` for a host compiler: the lanes of a warp are coroutines which run one after the other from
// one operation of the whole warp to the next. Lanes that meet in different operations end the process.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define DEVICE static inline
#define KERNEL static
#define UNROLL
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) float2 {
    float x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace warp {
constexpr int LANES = 32;
struct Slot {
    int operation;
    alignas(16) char bytes[64];
};
static ucontext_t scheduler, lanes[LANES];
static Slot slots[2][LANES];
static int current, program, turn[LANES];
static bool ended[LANES];
static char* memory;  // ends where nothing may be read

static void fail(const char* what) {
    fprintf(stderr, "warp_host: %s (program %d, lane %d)\n", what, program, current);
    abort();
}
// Everyone's ``mine``, once all lanes have come to the same operation.
template <typename V> static const Slot* meet(int operation, const V& mine) {
    static_assert(sizeof(V) <= sizeof(Slot::bytes), "an operand is larger than a slot");
    Slot* here = slots[turn[current] & 1];
    here[current].operation = operation;
    memcpy(here[current].bytes, &mine, sizeof(V));
    turn[current]++;
    swapcontext(&lanes[current], &scheduler);
    for (int other = 0; other < LANES; other++)
        if (here[other].operation != operation || turn[other] < turn[current]) fail("lanes have parted");
    return here;
}
template <typename V> static V of(const Slot* all, int lane) {
    V x;
    memcpy(&x, all[lane & 31].bytes, sizeof(V));
    return x;
}
struct Operands {
    u32 a[4], b[2];
};
static Operands operands(const u32 (&a)[4], u32 b0, u32 b1) { return {{a[0], a[1], a[2], a[3]}, {b0, b1}}; }
static float half(u16 bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
static void multiply(float (&d)[4], const Slot* all) {
    for (int i = 0; i < 4; i++) {
        int row = current / 4 + i / 2 * 8, column = current % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            u32 a = of<Operands>(all, row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2];
            u32 b = of<Operands>(all, column * 4 + k % 8 / 2).b[k / 8];
            sum += half(u16(a >> k % 2 * 16)) * half(u16(b >> k % 2 * 16));
        }
        d[i] += sum;
    }
}
}  // namespace warp

static inline int lane_id() { return warp::current; }
static inline int program_id() { return warp::program; }
static inline char* shared_memory() { return warp::memory; }
static inline void wait_for_launch_before() {}
static inline void launch_next() {}
static inline void sync_warp() { warp::meet(1, 0); }
template <typename V> static V shuffle(V x, int lane) { return warp::of<V>(warp::meet(2, x), lane); }
template <typename V> static V shuffle_xor(V x, int mask) {
    return warp::of<V>(warp::meet(3, x), warp::current ^ mask);
}
template <typename V> static V shuffle_up(V x, int by) {
    const warp::Slot* all = warp::meet(4, x);
    return warp::current < by ? x : warp::of<V>(all, warp::current - by);
}
static inline bool any_lane(bool x) {
    const warp::Slot* all = warp::meet(5, x);
    bool found = false;
    for (int lane = 0; lane < warp::LANES; lane++) found |= warp::of<bool>(all, lane);
    return found;
}

// A barrier: bytes that are still to come, and how many times all had come.
static inline void barrier_init(unsigned long long* barrier) { *barrier = 0; }
static inline void barriers_ready() {}
static inline void expect_bytes(unsigned long long* barrier, u32 bytes) {
    if ((u32)*barrier) warp::fail("a barrier that waits is told to wait for more");
    *barrier += bytes;
}
static inline void copy_bytes(void* to, const void* from, u32 bytes, unsigned long long* barrier) {
    if (bytes % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16) warp::fail("a copy is not aligned to 16 bytes");
    if ((u32)*barrier < bytes) warp::fail("a barrier expects fewer bytes");
    memcpy(to, from, bytes);
    *barrier -= bytes;
    if (!(u32)*barrier) *barrier += 1ull << 32;
}
static inline void wait_bytes(unsigned long long* barrier, u32 parity) {
    if ((u32)*barrier || ((*barrier >> 32) & 1) == parity) warp::fail("a copy that is waited for was not made");
}

static inline float power2(float x) { return std::exp2(x); }
static inline float log_2(float x) { return std::log2(x); }
static inline float half_to_float(u32 word) { return warp::half((u16)word); }
static inline float high_half_to_float(u32 word) { return warp::half((u16)(word >> 16)); }
static inline u32 pack_halves(float low, float high) {
    _Float16 x[2] = {(_Float16)low, (_Float16)high};
    u32 word;
    memcpy(&word, x, 4);
    return word;
}
static inline float as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

static inline void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const warp::Slot* all = warp::meet(6, warp::operands(a, b0, b1));
    for (int i = 0; i < 4; i++) {
        int row = warp::current / 4 + i / 2 * 8, column = warp::current % 4 * 2 + i % 2;
        for (int k = 0; k < 32; k++) {
            u32 x = warp::of<warp::Operands>(all, row % 8 * 4 + k % 16 / 4).a[row / 8 + k / 16 * 2];
            u32 y = warp::of<warp::Operands>(all, column * 4 + k % 16 / 4).b[k / 16];
            d[i] += (int)(u8)(x >> k % 4 * 8) * (int)(signed char)(y >> k % 4 * 8);
        }
    }
}
static inline void multiply_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    warp::multiply(d, warp::meet(7, warp::operands(a, b0, b1)));
}
template <int COUNT> static void load_transposed(u32 (&r)[COUNT], const char* row) {
    if ((uintptr_t)row % 16) warp::fail("a row of a matrix is not aligned to 16 bytes");
    const warp::Slot* all = warp::meet(9, row);
    for (int i = 0; i < COUNT; i++) {
        u16 pair[2];
        for (int k = 0; k < 2; k++)
            memcpy(&pair[k], warp::of<const char*>(all, 8 * i + warp::current % 4 * 2 + k) + warp::current / 4 * 2, 2);
        memcpy(&r[i], pair, 4);
    }
}

namespace warp {
static void (*body)();
static void lane_main() {
    body();
    ended[current] = true;
    swapcontext(&lanes[current], &scheduler);
}
// Runs ``programs`` blocks of a warp each, with so many bytes of shared memory, filled with ``poison`` before each.
static void run(int programs, void (*kernel)(), int shared, int poison) {
    constexpr size_t ROOM = 256 << 10;
    static char* room = (char*)mmap(nullptr, 2 * ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(room, ROOM, PROT_READ | PROT_WRITE);
    memory = room + ROOM - (shared + 127) / 128 * 128;
    constexpr size_t STACK = 256 << 10;
    static std::vector<char> stacks(STACK * LANES);
    body = kernel;
    for (program = 0; program < programs; program++) {
        memset(memory, poison, shared);
        for (current = 0; current < LANES; current++) {
            turn[current] = 0;
            ended[current] = false;
            getcontext(&lanes[current]);
            lanes[current].uc_stack.ss_sp = stacks.data() + STACK * current;
            lanes[current].uc_stack.ss_size = STACK;
            lanes[current].uc_link = nullptr;
            makecontext(&lanes[current], lane_main, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (current = 0; current < LANES; current++)
                if (!ended[current]) {
                    swapcontext(&scheduler, &lanes[current]);
                    running = true;
                }
            for (current = 1; current < LANES; current++)
                if (ended[current] != ended[0]) fail("lanes end at different operations");
        }
    }
}
}  // namespace warp
