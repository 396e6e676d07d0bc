// What both attention kernels compute alike: formats, roundings, and the merging of parts of the keys.
//
// Compiled with HEAD_DIM, 64 or 128, defined.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TILE 32
#define FULL_WARP 0xffffffffu
// FlashAttention 3 stores P times 256 in E4M3.
#define P_EXPONENT 8.0f

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two E4M3 of the lower half of a word as two FP16: exact.
__device__ __forceinline__ u32 low_to_half2(u32 word) {
    u32 y;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(y) : "r"(word));
    return y;
}

__device__ __forceinline__ u32 high_to_half2(u32 word) {
    u32 y;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(y) : "r"(word));
    return y;
}

// Two FP32 rounded to E4M3, as two FP16.
__device__ __forceinline__ u32 round_to_e4m3(float first, float second) {
    u32 y;
    asm("{ .reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, %2, %1; cvt.rn.f16x2.e4m3x2 %0, e; }"
        : "=r"(y)
        : "f"(first), "f"(second));
    return y;
}

__device__ __forceinline__ float sum_of_half2(u32 pair) {
    float y;
    asm("{ .reg .b16 l, h; .reg .f32 x; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; cvt.f32.f16 x, h; add.f32 %0, %0, x; }"
        : "=f"(y)
        : "r"(pair));
    return y;
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// How two parts of the keys become one: each part's O and sum, relative to its maximum, times a power of two. A part
// without keys, whose maximum is minus infinity, counts for nothing.
struct Merging {
    float maximum, before, of_more;

    __device__ __forceinline__ Merging(float first, float second) : maximum(fmaxf(first, second)) {
        const float base = maximum == minus_infinity() ? 0.0f : maximum;
        before = exp2_approximate(first - base);
        of_more = exp2_approximate(second - base);
    }
    __device__ __forceinline__ float of(float first, float second) const {
        return __fmaf_rn(second, of_more, __fmul_rn(first, before));
    }
};
