// Attention of the tokens of whole sequences over their own FP8 keys, with the bytes of decode_attention.cu.
//
// `widen_tiles` writes each tile of 32 keys, and its values, as the FP16 numbers that their codes are, in the order in
// which tensor cores read them. `sequence_attention` multiplies them. A block serves ROWS query rows (query heads of one
// KV head, of tokens side by side) and lives as long as there is work: one warp copies tiles through a queue in shared
// memory, two warpgroups of 64 rows each multiply.
//
// What a row computes is what decode_attention.cu computes. There a partition's tiles are dealt to four warps, each with
// a maximum, a sum and O of its own, which are merged in the order of the warps. Here the tiles of the first come first,
// then those of the second, and so on: four strands, merged alike. Within a tile both have the same order of keys, of
// head dimensions, and of additions; a wgmma of 16 numbers adds them as mma.m16n8k16 does.
//
// wgmma.m64nNk16, lane = 4 * g + c of warp w: a thread has rows 16 w + g and 16 w + g + 8, columns 8 t + 2c and 8 t + 2c + 1.
//
// Compiled with GROUP (query heads per KV head), PAGE (keys of a cache block, a multiple of 16), PARTITION (keys of a
// partition, a multiple of 32), PARTITIONS of the longest sequence, and the cache's strides in bytes (BLOCK_STRIDE,
// KEY_STRIDE, HEAD_STRIDE) defined.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define HEAD_DIM 128
#define TILE 32
#define STRANDS 4
#define APART (STRANDS * TILE)  // keys from one tile of a strand to the next
#define ROWS 128
#define WARPGROUPS 2
#define IMAGE (2 * TILE * HEAD_DIM * 2)  // bytes of a pair's keys, and of its values, in FP16
#define STAGE_BYTES (2 * IMAGE)
#define STAGES (PARTITIONS > 1 ? 3 : 5)
// Of a whole partition.
#define PAIRS (PARTITION / TILE / (2 * STRANDS) * STRANDS + min(PARTITION / TILE % (2 * STRANDS), STRANDS))
#define FULL_WARP 0xffffffffu
// FlashAttention 3 stores P times 256 in E4M3.
#define P_EXPONENT 8.0f

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Volatile, as what makes weights is: it has to stand where products run beside it.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
    asm volatile("{ .reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, %2, %1; cvt.rn.f16x2.e4m3x2 %0, e; }"
        : "=r"(y)
        : "f"(first), "f"(second));
    return y;
}

__device__ __forceinline__ float sum_of_half2(u32 pair) {
    float y;
    asm volatile("{ .reg .b16 l, h; .reg .f32 x; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; cvt.f32.f16 x, h; add.f32 %0, %0, x; }"
        : "=f"(y)
        : "r"(pair));
    return y;
}

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Two tiles of a strand make a pair, if there are two. Its image is core matrices of 8 rows of 16 bytes. Keys: [16 pieces
// of head_dim][8][8 keys][8 of head_dim], where a contraction of 16, two pieces, has what mma number 4 j + i of
// decode_attention.cu has: 64 j + 16 c + 4 i + 0..3 of each c, in its order. Values: [8][16][8 of head_dim][8 keys].
extern "C" __global__ void __launch_bounds__(256) widen_pairs(
    const u8* __restrict__ keys, const u8* __restrict__ values, const int* __restrict__ block_table, i64 table_stride,
    const int* __restrict__ lengths, const int2* __restrict__ pairs, u8* __restrict__ images) {
    const int head = blockIdx.x, pair = blockIdx.y, owner = pairs[pair].x, half = threadIdx.x / 128;
    const int first = pairs[pair].y + half * APART, thread = threadIdx.x % 128;
    // The second tile of the last pair of a partition may be the next one's.
    const int length = first / PARTITION == pairs[pair].y / PARTITION ? lengths[owner] : 0;
    const int* const blocks = block_table + owner * table_stride;
    u8* const image = images + ((i64)head * gridDim.y + pair) * STAGE_BYTES;
    const auto offset = [&](int key) {
        return (i64)blocks[key / PAGE] * BLOCK_STRIDE + key % PAGE * KEY_STRIDE + head * HEAD_STRIDE;
    };
    {
        const int row = thread % 32, j = thread / 64, two = thread / 32 % 2;
        uint4 codes[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            codes[c] = make_uint4(0, 0, 0, 0);
            if (first + row < length)
                codes[c] = *reinterpret_cast<const uint4*>(keys + offset(first + row) + 64 * j + 16 * c);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            u32 w[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                w[c] = two == 0 ? (n == 0 ? codes[c].x : codes[c].y) : (n == 0 ? codes[c].z : codes[c].w);
            const int piece = 2 * (4 * j + 2 * two + n);
            uint4* const at = reinterpret_cast<uint4*>(image) + (piece * 8 + 4 * half + row / 8) * 8 + row % 8;
            at[0] = make_uint4(low_to_half2(w[0]), low_to_half2(w[1]), low_to_half2(w[2]), low_to_half2(w[3]));
            at[64] = make_uint4(high_to_half2(w[0]), high_to_half2(w[1]), high_to_half2(w[2]), high_to_half2(w[3]));
        }
    }
    {
        const int eight = thread / 32, word = thread % 32;
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int key = first + 8 * eight + i;
            codes[i] = 0;
            if (key < length) codes[i] = *reinterpret_cast<const u32*>(values + offset(key) + 4 * word);
        }
        uint4* const at =
            reinterpret_cast<uint4*>(image + IMAGE) + ((4 * half + eight) * 16 + word / 2) * 8 + word % 2 * 4;
        u32 even[4], odd[4];  // of two keys: elements 0 and 1, elements 2 and 3
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            even[i] = __byte_perm(codes[2 * i], codes[2 * i + 1], 0x5140);
            odd[i] = __byte_perm(codes[2 * i], codes[2 * i + 1], 0x7362);
        }
        at[0] = make_uint4(low_to_half2(even[0]), low_to_half2(even[1]), low_to_half2(even[2]), low_to_half2(even[3]));
        at[1] = make_uint4(high_to_half2(even[0]), high_to_half2(even[1]), high_to_half2(even[2]), high_to_half2(even[3]));
        at[2] = make_uint4(low_to_half2(odd[0]), low_to_half2(odd[1]), low_to_half2(odd[2]), low_to_half2(odd[3]));
        at[3] = make_uint4(high_to_half2(odd[0]), high_to_half2(odd[1]), high_to_half2(odd[2]), high_to_half2(odd[3]));
    }
}

// ---- Barriers and copies --------------------------------------------------------------------------------------------

__device__ __forceinline__ void initialise(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni out;\n"
        "bra.uni again;\nout:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// A tile's image to shared memory; `barrier` is passed when all of it is there.
__device__ __forceinline__ void copy_stage(u32 shared, const u8* image, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(STAGE_BYTES) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(image), "n"(STAGE_BYTES), "r"(barrier) : "memory");
}

// ---- Products -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than `left` groups of products are on their way.
template <int left>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Core matrices without a swizzle; distances in bytes along the contraction and along the columns.
__device__ __forceinline__ u64 matrix(u32 shared, int along_contraction, int along_columns) {
    return (u64)(shared >> 4) | (u64)(along_contraction >> 4) << 16 | (u64)(along_columns >> 4) << 32;
}

#define F4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F16(x, i) F4(x, i), F4(x, i + 4), F4(x, i + 8), F4(x, i + 12)

// 16 of head_dim: rows by the 64 keys of a pair.
__device__ __forceinline__ void multiply_keys(float (&s)[32], const u32 (&q)[4], u64 keys, int added) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
        "%35}, %36, p, 1, 1, 0;\n}"
        : F16(s, 0), F16(s, 16)
        : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(keys), "r"(added));
}

// 16 keys: rows by head_dim, added to O.
__device__ __forceinline__ void multiply_values(float (&o)[64], const u32 (&p)[4], u64 values) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : F16(o, 0), F16(o, 16), F16(o, 32), F16(o, 48)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(values));
}

// As `multiply_values`, for 8 of head_dim, by a warp alone.
__device__ __forceinline__ void multiply_alone(float* c, const u32 (&p)[4], u32 low, u32 high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : F4(c, 0)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ u32 multiply_half2(u32 pair, u32 by) {
    u32 y;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(by));
    return y;
}

__device__ __forceinline__ u32 twice_half(float x) {
    u32 y;
    asm volatile("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b32 %0, {h, h}; }" : "=r"(y) : "f"(x));
    return y;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// A strand's maximum and sum of this thread's two rows. The sum is of this thread's columns; the maximum of all.
struct Sums {
    float maximum[2];
    float sum[2];
};

__device__ __forceinline__ Sums no_sums() { return {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}}; }

// From scores of a tile to P, and the sums relative to the new maximum; returns whether that of a row of the warp was
// raised, and by which factor. As `soften` of decode_attention.cu. `left` keys of the tile are a row's. P is as wgmma
// takes it: [16 keys][rows g and g + 8 of keys 2c and 2c + 1, then of keys 2c + 8 and 2c + 9].
template <int tile, bool masked>
__device__ __forceinline__ bool soften(
    Sums& sums, float (&factor)[2], u32 (&p)[4][4], float (&s)[32], float scale, const int (&left)[2], int c) {
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = minus_infinity();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[16 * tile + 4 * t + 2 * r + i];
                x = !masked || 8 * t + 2 * c + i < left[r] ? x * scale : minus_infinity();
                highest = fmaxf(highest, x);
            }
        }
        highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 2));
        const float maximum = fmaxf(sums.maximum[r], ceilf(highest));
        // A row that has seen no key yet: all of its P are 0.
        const float base = maximum == minus_infinity() ? 0.0f : maximum;
        const bool higher = maximum > sums.maximum[r];
        factor[r] = higher ? exp2_approximate(sums.maximum[r] - base) : 1.0f;
        raised |= higher;
        sums.maximum[r] = maximum;
        sums.sum[r] *= factor[r];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float* const x = s + 16 * tile + 4 * t + 2 * r;
            const float first = exp2_approximate(x[0] - base + P_EXPONENT), second = exp2_approximate(x[1] - base + P_EXPONENT);
            u32& pair = p[2 * tile + t / 2][t % 2 * 2 + r];
            pair = round_to_e4m3(first, second);
            sums.sum[r] += sum_of_half2(pair);
        }
    }
    return __any_sync(FULL_WARP, raised);
}

__device__ __forceinline__ void rescale(float (&o)[64], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] *= factor[i / 2 % 2];
}

// Strands, or partitions, that were merged: O is in shared memory, [16][threads] of four numbers, each thread its own.
struct Merged {
    float4* o;
    Sums sums;  // The sum is of the whole row.

    // With one more. All but the last are written back; `o` then holds the result.
    template <bool written>
    __device__ __forceinline__ void add(float (&more)[64], const Sums& with, bool first) {
        float before[2], of_more[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float maximum = first ? with.maximum[r] : fmaxf(sums.maximum[r], with.maximum[r]);
            const float base = maximum == minus_infinity() ? 0.0f : maximum;
            before[r] = first ? 0.0f : exp2_approximate(sums.maximum[r] - base);
            of_more[r] = exp2_approximate(with.maximum[r] - base);
            sums.sum[r] = __fmaf_rn(with.sum[r], of_more[r], first ? 0.0f : __fmul_rn(sums.sum[r], before[r]));
            sums.maximum[r] = maximum;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float4* const at = o + i * 128 * WARPGROUPS;
            const float4 old = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *at;
            more[4 * i] = __fmaf_rn(more[4 * i], of_more[0], __fmul_rn(old.x, before[0]));
            more[4 * i + 1] = __fmaf_rn(more[4 * i + 1], of_more[0], __fmul_rn(old.y, before[0]));
            more[4 * i + 2] = __fmaf_rn(more[4 * i + 2], of_more[1], __fmul_rn(old.z, before[1]));
            more[4 * i + 3] = __fmaf_rn(more[4 * i + 3], of_more[1], __fmul_rn(old.w, before[1]));
            if (written) *at = make_float4(more[4 * i], more[4 * i + 1], more[4 * i + 2], more[4 * i + 3]);
        }
    }
};

// One piece of work: tokens side by side of one sequence.
struct Work {
    int tile;    // the first of the sequence's tiles
    int row;     // of the query, of the first token
    int seen;    // keys that the first token sees; each other sees one more than the one before
    int tokens;  // at most ROWS / GROUP
};

// The pairs of a piece of work in the order of strands, up to `end` keys.
struct Order {
    int end, part, strand, tile, tiles, first_image;

    __device__ __forceinline__ explicit Order(int keys) : end(keys), part(0), first_image(0) { begin(); }
    __device__ __forceinline__ void begin() {
        strand = tile = 0;
        tiles = (min(end - part, PARTITION) + TILE - 1) / TILE;
    }
    __device__ __forceinline__ bool done() const { return part >= end; }
    __device__ __forceinline__ int first_key() const { return part + tile * TILE; }
    __device__ __forceinline__ bool has_second() const { return tile + STRANDS < PARTITION / TILE; }
    __device__ __forceinline__ int image() const { return first_image + tile / (2 * STRANDS) * STRANDS + strand; }
    __device__ __forceinline__ void next() {
        tile += 2 * STRANDS;
        if (tile < tiles) return;
        tile = ++strand;
        if (strand < STRANDS && tile < tiles) return;
        part += PARTITION;
        first_image += PAIRS;
        begin();
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) sequence_attention(
    const u8* __restrict__ query, i64 query_stride, const u8* __restrict__ images, i64 pairs, const int4* __restrict__ work,
    i64 pieces, i64 kv_heads, const float* __restrict__ query_scale, const float* __restrict__ key_scale,
    const float* __restrict__ value_scale, float softmax_scale, u16* __restrict__ output, i64 output_stride,
    float* __restrict__ logsumexp, i64 logsumexp_stride) {
    extern __shared__ __align__(1024) u8 queue[];  // [STAGES][STAGE_BYTES], then O of merged strands, and of partitions
    __shared__ u64 barriers[2 * STAGES];
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    const u32 stages = (u32)__cvta_generic_to_shared(queue);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            initialise(full + 8 * i, 1);
            initialise(empty + 8 * i, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int all = (int)(pieces * kv_heads);
    int stage = 0;
    u32 parity = 0;
    const auto advance = [&]() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    };

    if (threadIdx.x >= 128 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 128 * WARPGROUPS) return;
        for (int index = blockIdx.x; index < all; index += gridDim.x) {
            const int4 piece = work[index / (int)kv_heads];
            const u8* const image = images + ((i64)(index % (int)kv_heads) * pairs + piece.x) * STAGE_BYTES;
            for (Order order(piece.z + piece.w - 1); !order.done(); order.next()) {
                wait_for(empty + 8 * stage, parity ^ 1);
                copy_stage(stages + stage * STAGE_BYTES, image + (i64)order.image() * STAGE_BYTES, full + 8 * stage);
                advance();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const float scale = softmax_scale * 1.4426950408889634f * *query_scale * *key_scale;
    float4* const own = reinterpret_cast<float4*>(queue + STAGES * STAGE_BYTES) + threadIdx.x;
    const auto leave = [&](int of) {
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * of);
    };
    for (int index = blockIdx.x; index < all; index += gridDim.x) {
        const int4 loaded = work[index / (int)kv_heads];
        const Work piece = {loaded.x, loaded.y, loaded.z, loaded.w};
        const int head = index % (int)kv_heads;
        int seen[2];
        const u8* from[2];
        u32 q[8][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 64 * group + 16 * warp + g + 8 * r, token = row / GROUP;
            const bool used = token < piece.tokens;
            seen[r] = used ? piece.seen + token : 0;
            from[r] = query + (i64)(piece.row + (used ? token : 0)) * query_stride + (head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (used) x = *reinterpret_cast<const uint4*>(from[r] + 64 * j + 16 * c);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    q[4 * j + i][r] = low_to_half2(word_of(x, i));
                    q[4 * j + i][2 + r] = high_to_half2(word_of(x, i));
                }
            }
        }
        // Of this warpgroup's rows: the most keys that one sees, and the least.
        const int last = min(piece.tokens, (64 * group + 63) / GROUP + 1), before = 64 * group / GROUP;
        const int end = before < last ? piece.seen + last - 1 : 0;
        const int least = 64 * group + 63 < piece.tokens * GROUP ? piece.seen + before : 0;

        float o[64], s[32], factor[2][2];
        u32 p[2][4][4];
        bool raised[2];
        Sums sums = no_sums();
        Merged strands{own, no_sums()}, partitions{own + 16 * 128 * WARPGROUPS, no_sums()};
        bool first_strand = true, first_part = true;

        // To the next pair that one of this warpgroup's rows sees; the others are given back as they come.
        Order order(piece.seen + piece.tokens - 1);
        const auto seek = [&]() {
            while (!order.done()) {
                wait_for(full + 8 * stage, parity);
                if (order.first_key() < end) return true;
                leave(stage);
                advance();
                order.next();
            }
            return false;
        };
        const auto multiply_query = [&]() {
            const u32 at = stages + stage * STAGE_BYTES;
            begin_products();
#pragma unroll
            for (int k = 0; k < 8; ++k) multiply_keys(s, q[k], matrix(at + k * 2048, 1024, 128), k);
            end_products();
        };
        const auto multiply_weights = [&](const u32 (&weights)[4][4], int of) {
            const u32 at = stages + of * STAGE_BYTES + IMAGE;
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_values(o, weights[k], matrix(at + k * 4096, 2048, 128));
            end_products();
        };
        const auto to_weights = [&](Sums& of, u32 (&weights)[4][4]) {
            const int first = order.first_key(), second = first + APART;
            const int left[2] = {seen[0] - first, seen[1] - first};
            const bool both = order.has_second();
            const int left_then[2] = {both ? seen[0] - second : 0, both ? seen[1] - second : 0};
            if (both && second + TILE <= least) {
                raised[0] = soften<0, false>(of, factor[0], weights, s, scale, left, c);
                raised[1] = soften<1, false>(of, factor[1], weights, s, scale, left_then, c);
            } else {
                raised[0] = soften<0, true>(of, factor[0], weights, s, scale, left, c);
                raised[1] = soften<1, true>(of, factor[1], weights, s, scale, left_then, c);
            }
        };
        // O, and P of the first tile, relative to the maximum after the second. P stays exact in FP16 if the maximum
        // rose by no more than 15. Else this warp multiplies the first tile by itself.
        const auto raise = [&](u32 (&weights)[4][4]) {
            if (raised[0]) rescale(o, factor[0]);
            if (!raised[1]) return;
            if (__any_sync(FULL_WARP, fminf(factor[1][0], factor[1][1]) < 0x1p-15f)) {
                const u8* const at = queue + stage * STAGE_BYTES + IMAGE + g * 16 + c * 4;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
#pragma unroll
                    for (int n = 0; n < 16; ++n) {
                        const u32 low = *reinterpret_cast<const u32*>(at + k * 4096 + n * 128);
                        const u32 high = *reinterpret_cast<const u32*>(at + k * 4096 + 2048 + n * 128);
                        multiply_alone(o + 4 * n, weights[k], low, high);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) weights[k][i] = 0;
                }
            } else {
                const u32 by[2] = {twice_half(factor[1][0]), twice_half(factor[1][1])};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) weights[k][i] = multiply_half2(weights[k][i], by[i % 2]);
                }
            }
            rescale(o, factor[1]);
        };
        const auto end_strand = [&](bool part_ends) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sums.sum[r] += __shfl_xor_sync(FULL_WARP, sums.sum[r], 1);
                sums.sum[r] += __shfl_xor_sync(FULL_WARP, sums.sum[r], 2);
            }
            if (part_ends) {
                strands.add<false>(o, sums, first_strand);
                if (PARTITIONS > 1) {
                    partitions.add<true>(o, strands.sums, first_part);
                    first_part = false;
                }
            } else {
                strands.add<true>(o, sums, first_strand);
            }
            first_strand = part_ends;
        };
        const auto nothing_yet = [&]() {
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] = 0.0f;
        };
        // From one pair to the next, whose scores are multiplied beside this one's values; false where there is none.
        // Weights alternate, because products read registers while the next weights are made.
        const auto one_pair = [&](const u32 (&weights)[4][4], u32 (&following)[4][4]) {
            const int now = stage, strand = order.strand, part = order.part;
            advance();
            order.next();
            if (!seek()) {
                multiply_weights(weights, now);
                wait_for_products<0>();
                leave(now);
                end_strand(true);
                return false;
            }
            multiply_query();
            multiply_weights(weights, now);
            const bool part_ends = order.part != part, strand_ends = part_ends || order.strand != strand;
            Sums next = strand_ends ? no_sums() : sums;
            wait_for_products<1>();
            to_weights(next, following);
            wait_for_products<0>();
            leave(now);
            if (strand_ends) {
                end_strand(part_ends);
                nothing_yet();
            }
            raise(following);
            sums = next;
            return true;
        };
        if (seek()) {
            multiply_query();
            wait_for_products<0>();
            nothing_yet();
            to_weights(sums, p[0]);
            raise(p[0]);
            while (one_pair(p[0], p[1]) && one_pair(p[1], p[0])) {
            }
        }
        const Sums& total = PARTITIONS > 1 ? partitions.sums : strands.sums;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 64 * group + 16 * warp + g + 8 * r;
            if (seen[r] == 0) continue;
            const float unit = *value_scale / total.sum[r];
            u16* const to = output + (i64)(piece.row + row / GROUP) * output_stride + (head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                *reinterpret_cast<u32*>(to + 8 * n + 2 * c) = to_bf16x2(o[4 * n + 2 * r] * unit, o[4 * n + 2 * r + 1] * unit);
            }
            if (c == 0)
                logsumexp[(head * GROUP + row % GROUP) * logsumexp_stride + piece.row + row / GROUP] =
                    (total.maximum[r] - P_EXPONENT + log2f(total.sum[r])) * 0.6931471805599453f;
        }
    }
}
