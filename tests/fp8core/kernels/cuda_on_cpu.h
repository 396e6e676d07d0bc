// Stand-ins for what decode_attention.cu uses of CUDA, so that its source runs on a CPU (test_decode_attention_source.py).
//
// The threads of a block are fibers of one thread; a warp's collective operations and barriers switch between them.
// Blocks run one after the other. Tensor cores multiply exactly and round each sum to FP32.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct dim { int x, y, z; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

constexpr int THREADS = 128, LANES = 32, STACK = 1 << 16;
static ucontext_t scheduler, fibers[THREADS];
static bool done[THREADS];
static int running;
static dim blockIdx, gridDim;
static uint4 dynamic_shared[1 << 14];
#define threadIdx (dim{running, 0, 0})

// Who has arrived at a barrier, and how many times everybody had.
struct Barrier { int arrived, turns; };
static Barrier warp_barriers[THREADS / LANES], block_barrier;

inline void wait_at(Barrier& barrier, int everybody) {
    const int turn = barrier.turns;
    if (++barrier.arrived == everybody) {
        barrier.arrived = 0;
        ++barrier.turns;
    }
    while (barrier.turns == turn) swapcontext(&fibers[running], &scheduler);
}
inline void __syncthreads() { wait_at(block_barrier, THREADS); }
inline void __syncwarp() { wait_at(warp_barriers[running / LANES], LANES); }
inline void __threadfence() {}

// What the lanes of a warp show one another.
struct Shown { u32 words[LANES][6]; };
static Shown shown[THREADS / LANES];

template <typename Read>
auto collectively(const u32 (&own)[6], Read read) {
    Shown& warp = shown[running / LANES];
    std::memcpy(warp.words[running % LANES], own, sizeof(own));
    __syncwarp();
    const auto result = read(warp);
    __syncwarp();
    return result;
}
inline u32 bits_of(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __shfl_sync(u32, float x, int lane) {
    return collectively({bits_of(x)}, [&](const Shown& warp) { return __int_as_float(warp.words[lane][0]); });
}
inline float __shfl_xor_sync(u32 mask, float x, int other) { return __shfl_sync(mask, x, running % LANES ^ other); }
inline bool __any_sync(u32, bool x) {
    return collectively({x}, [](const Shown& warp) {
        bool any = false;
        for (const auto& words : warp.words) any |= words[0] != 0;
        return any;
    });
}

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const std::uint64_t both = (std::uint64_t)b << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; ++i) y |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return y;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename T> T __ldcg(const T* at) { return *at; }
inline int atomicAdd(int* at, int x) { const int before = *at; *at += x; return before; }

// The functions that are PTX in the source.
inline float exp2_approximate(float x) { return std::exp2(x); }
inline void copy16(uint4* shared, const u8* global) { std::memcpy(shared, global, 16); }
inline void end_of_copies() {}
template <int left> void wait_for_copies() {}

inline u16 half_of_e4m3(u32 code) {
    const u32 exponent = code >> 3 & 15, fraction = code & 7, sign = (code & 0x80) << 8;
    if ((code & 0x7f) == 0x7f) return sign | 0x7e00;
    if (exponent) return sign | (exponent + 8) << 10 | fraction << 7;
    if (!fraction) return sign;
    const int top = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0;
    return sign | (top + 6) << 10 | (fraction << (10 - top) & 0x3ff);
}
inline float float_of_half(u16 half) {
    const int exponent = half >> 10 & 31;
    const float magnitude = exponent == 31 ? NAN : exponent ? std::ldexp(1024 + (half & 1023), exponent - 25)
                                                            : std::ldexp(half & 1023, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}
inline u32 low_to_half2(u32 word) { return half_of_e4m3(word & 0xff) | (u32)half_of_e4m3(word >> 8 & 0xff) << 16; }
inline u32 high_to_half2(u32 word) { return low_to_half2(word >> 16); }
// Rounded to so many bits of fraction, above a least exponent, and saturated; as FP16.
inline u16 half_of_rounded(float x, int bits, int least, float most) {
    if (std::isnan(x)) return 0x7e00;
    const u16 sign = bits_of(x) >> 16 & 0x8000;
    x = std::fmin(std::fabs(x), most);
    const int exponent = x < std::ldexp(1.0f, least) ? least : std::ilogb(x);
    const float rounded = std::ldexp(std::nearbyint(std::ldexp(x, bits - exponent)), exponent - bits);
    if (rounded < 0x1p-14f) return sign | (int)std::ldexp(rounded, 24);
    const int top = std::ilogb(rounded);
    return sign | (top + 15) << 10 | ((int)std::ldexp(rounded, 10 - top) & 0x3ff);
}
inline u32 round_to_e4m3(float first, float second) {
    return half_of_rounded(first, 3, -6, 448) | (u32)half_of_rounded(second, 3, -6, 448) << 16;
}
inline u32 round_to_half2(float first, float second) {
    return half_of_rounded(first, 10, -14, 65504) | (u32)half_of_rounded(second, 10, -14, 65504) << 16;
}
inline float sum_of_half2(u32 pair) { return float_of_half(pair & 0xffff) + float_of_half(pair >> 16); }
inline u16 to_bf16(float x) {
    const u32 y = bits_of(x);
    return std::isnan(x) ? 0x7fff : (y + 0x7fff + (y >> 16 & 1)) >> 16;
}

// mma.m16n8k16 with FP16 operands and FP32 sums.
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Four { float c[4]; };
    const int g = running % LANES / 4, t = running % LANES % 4;
    const Four sums = collectively({a0, a1, a2, a3, b0, b1}, [&](const Shown& warp) {
        const auto half = [](u32 word, int i) { return (double)float_of_half(word >> 16 * i & 0xffff); };
        Four found;
        for (int i = 0; i < 4; ++i) {
            const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
            double sum = c[i];
            for (int k = 0; k < 16; ++k) {
                const u32 a = warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
                const u32 b = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
                sum += half(a, k % 2) * half(b, k % 2);
            }
            found.c[i] = (float)sum;
        }
        return found;
    });
    std::memcpy(c, sums.c, sizeof(c));
}

// Run every block of a grid; `call` is the kernel with its arguments.
template <typename Call>
void launch(dim grid, Call call) {
    static Call* kernel;
    static char stacks[THREADS][STACK];
    kernel = &call;
    gridDim = grid;
    for (int i = 0; i < grid.x * grid.y * grid.z; ++i) {
        blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        for (running = 0; running < THREADS; ++running) {
            done[running] = false;
            getcontext(&fibers[running]);
            fibers[running].uc_stack.ss_sp = stacks[running];
            fibers[running].uc_stack.ss_size = STACK;
            fibers[running].uc_link = &scheduler;
            void (*const thread)() = [] { (*kernel)(); done[running] = true; };
            makecontext(&fibers[running], thread, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (running = 0; running < THREADS; ++running) {
                if (!done[running]) swapcontext(&scheduler, &fibers[running]);
                left |= !done[running];
            }
        }
    }
}
