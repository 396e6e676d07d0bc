// What both attention kernels compute alike: formats, roundings, and the merging of parts of the keys.
//
// Compiled with HEAD_DIM, 64 or 128, and PRODUCTS_16 defined: 1 for Q and P in FP16, 0 for both in E4M3.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TILE 32
#define FULL_WARP 0xffffffffu
// FlashAttention 3 stores P times 256 in E4M3.
#define P_EXPONENT 8.0f
#if PRODUCTS_16
#define QUERY_BYTES 2  // of an element: BF16
#else
#define QUERY_BYTES 1  // E4M3
#endif

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

// Two FP32 rounded to FP16, saturated.
__device__ __forceinline__ u32 round_to_half2(float first, float second) {
    u32 y;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(first), "f"(second));
    return y;
}

// P as it is multiplied and summed.
__device__ __forceinline__ u32 round_weights(float first, float second) {
#if PRODUCTS_16
    return round_to_half2(first, second);
#else
    return round_to_e4m3(first, second);
#endif
}

__device__ __forceinline__ float sum_of_half2(u32 pair) {
    float y;
    asm("{ .reg .b16 l, h; .reg .f32 x; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; cvt.f32.f16 x, h; add.f32 %0, %0, x; }"
        : "=f"(y)
        : "r"(pair));
    return y;
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

__device__ __forceinline__ uint4 load16(const u8* address) { return *reinterpret_cast<const uint4*>(address); }

// 16 of head_dim of a query, in FP16.
struct Sixteen {
    u32 pairs[8];
};

__device__ __forceinline__ Sixteen load_query(const u8* at) {
    Sixteen x;
#if PRODUCTS_16
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 word = word_of(load16(at + i / 4 * 16), i % 4);
        x.pairs[i] = round_to_half2(__int_as_float(word << 16), __int_as_float(word & 0xffff0000u));
    }
#else
    const uint4 codes = load16(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x.pairs[2 * i] = low_to_half2(word_of(codes, i));
        x.pairs[2 * i + 1] = high_to_half2(word_of(codes, i));
    }
#endif
    return x;
}

// From a product of Q and K to a score in powers of two. Q in FP16 has no scale.
__device__ __forceinline__ float scale_of_scores(float softmax_scale, const float* query_scale, const float* key_scale) {
    const float scale = softmax_scale * 1.4426950408889634f;
#if PRODUCTS_16
    return scale * *key_scale;
#else
    return scale * *query_scale * *key_scale;
#endif
}

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
