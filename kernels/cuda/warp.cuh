// What kernels of one warp a block use of a Hopper GPU. For a host compiler ``warp_host.hpp`` has the same names.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll")
constexpr u32 EVERYONE = 0xffffffffu;

DEVICE int lane_id() { return threadIdx.x; }
DEVICE int program_id() { return blockIdx.x; }
DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void sync_warp() { __syncwarp(); }
template <typename V> DEVICE V shuffle(V x, int lane) { return __shfl_sync(EVERYONE, x, lane); }
template <typename V> DEVICE V shuffle_xor(V x, int mask) { return __shfl_xor_sync(EVERYONE, x, mask); }
template <typename V> DEVICE V shuffle_up(V x, int by) { return __shfl_up_sync(EVERYONE, x, by); }
DEVICE bool any_lane(bool x) { return __any_sync(EVERYONE, x); }

// Copies of whole pages into shared memory, which count the bytes that a barrier of ``barrier_init`` still waits for.
DEVICE void barrier_init(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void expect_bytes(unsigned long long* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void copy_bytes(void* to, const void* from, u32 bytes, unsigned long long* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
DEVICE void wait_bytes(unsigned long long* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

DEVICE float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log_2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float half_to_float(u32 low_half) {
    float y;
    asm("{.reg .b16 h; mov.b32 {h, _}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(low_half));
    return y;
}
DEVICE float high_half_to_float(u32 word) {  // not of ``word >> 16``, which is an instruction more for each
    float y;
    asm("{.reg .b16 h; mov.b32 {_, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(word));
    return y;
}
DEVICE u32 pack_halves(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float as_float(u32 x) { return __uint_as_float(x); }

// Fragments as PTX numbers them: lane 4 r + c holds of the result rows r and r + 8, columns 2 c and 2 c + 1.
DEVICE void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // unsigned by signed, k = 32
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // k = 16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four (two) matrices of 8 x 8 16-bit numbers, transposed; lanes 8 i to 8 i + 7 give the rows of matrix i.
DEVICE void load_transposed(u32 (&r)[4], const char* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
DEVICE void load_transposed(u32 (&r)[2], const char* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row)));
}
