// Attention of the tokens of whole sequences over their own FP8 keys, with the bytes of decode_attention.cu.
//
// `widen_pairs` writes each two tiles of 32 keys, and their values, as the FP16 numbers that their codes are, in the order
// in which tensor cores read them. `sequence_attention` multiplies them. A block serves ROWS query rows (query heads of one
// KV head, of tokens side by side) and lives as long as there is work: one warp copies keys and values through a queue in
// shared memory, three warpgroups of 64 rows each multiply.
//
// What a row computes is what decode_attention.cu computes. There a partition's tiles are dealt to four warps, each with
// a maximum, a sum and O of its own, which are merged in the order of the warps. Here the tiles of the first come first,
// then those of the second, and so on: four strands, merged alike. Within a tile both have the same order of keys, of
// head dimensions, and of additions; a wgmma of 16 numbers adds them as mma.m16n8k16 does.
//
// wgmma.m64nNk16, lane = 4 * g + c of warp w: a thread has rows 16 w + g and 16 w + g + 8, columns 8 t + 2c and 8 t + 2c + 1.
//
// Compiled with GROUP (query heads per KV head), PAGE (keys of a cache block, a multiple of 16), PARTITION (keys of a
// partition, a multiple of 32) and the cache's strides in bytes (BLOCK_STRIDE, KEY_STRIDE, HEAD_STRIDE) defined.

#define STRANDS 4
#define APART (STRANDS * TILE)  // keys from one tile of a strand to the next
#define WARPGROUPS 3
#define ROWS (64 * WARPGROUPS)
#define IMAGE (2 * TILE * HEAD_DIM * 2)  // bytes of a pair's keys, and of its values, in FP16
#define PAIR_BYTES (2 * IMAGE)
#define EIGHT_KEYS (8 * HEAD_DIM * 2)  // bytes of their values
#define PER_THREAD (HEAD_DIM / 2)      // of O
#define FOURS (PER_THREAD / 4)
#define STAGES 5  // of keys or values
// Of a whole partition.
#define PAIRS (PARTITION / TILE / (2 * STRANDS) * STRANDS + min(PARTITION / TILE % (2 * STRANDS), STRANDS))

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Two tiles of a strand make a pair, if there are two. Its image is core matrices of 8 rows of 16 bytes. Keys: [pieces of
// 8 of head_dim][8][8 keys][8 of head_dim], where a contraction of 16, two pieces, has what mma number 4 j + i of
// decode_attention.cu has: 64 j + 16 c + 4 i + 0..3 of each c, in its order. Values: [8][pieces][8 of head_dim][8 keys].
extern "C" __global__ void __launch_bounds__(256) widen_pairs(
    const u8* __restrict__ keys, const u8* __restrict__ values, const int* __restrict__ block_table, i64 table_stride,
    const int* __restrict__ lengths, const int2* __restrict__ pairs, u8* __restrict__ images) {
    const int head = blockIdx.x, pair = blockIdx.y, owner = pairs[pair].x, half = threadIdx.x / 128;
    const int first = pairs[pair].y + half * APART, thread = threadIdx.x % 128;
    // The second tile of the last pair of a partition may be the next one's.
    const int length = first / PARTITION == pairs[pair].y / PARTITION ? lengths[owner] : 0;
    const int* const blocks = block_table + owner * table_stride;
    u8* const image = images + ((i64)head * gridDim.y + pair) * PAIR_BYTES;
    const auto offset = [&](int key) {
        return (i64)blocks[key / PAGE] * BLOCK_STRIDE + key % PAGE * KEY_STRIDE + head * HEAD_STRIDE;
    };
    if (thread < HEAD_DIM) {
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
    if (thread % 32 < HEAD_DIM / 4) {
        const int eight = thread / 32, word = thread % 32;
        u32 codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int key = first + 8 * eight + i;
            codes[i] = 0;
            if (key < length) codes[i] = *reinterpret_cast<const u32*>(values + offset(key) + 4 * word);
        }
        uint4* const at =
            reinterpret_cast<uint4*>(image + IMAGE) + ((4 * half + eight) * (HEAD_DIM / 8) + word / 2) * 8 + word % 2 * 4;
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

// Keys or values of a pair to shared memory; `barrier` is passed when all of them are there.
__device__ __forceinline__ void copy_image(u32 shared, const u8* image, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(IMAGE) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(image), "n"(IMAGE), "r"(barrier) : "memory");
}

// Images of keys and of values in turn, from the warp that copies to the warps that multiply.
struct Queue {
    u32 images, full, empty, parity;
    int stage;

    __device__ __forceinline__ Queue(const u8* memory, const u64* barriers) : parity(0), stage(0) {
        images = (u32)__cvta_generic_to_shared(memory);
        full = (u32)__cvta_generic_to_shared(barriers);
        empty = full + 8 * STAGES;
    }
    __device__ __forceinline__ u32 image() const { return images + stage * IMAGE; }
    __device__ __forceinline__ void wait_until_full() const { wait_for(full + 8 * stage, parity); }
    __device__ __forceinline__ void wait_until_empty() const { wait_for(empty + 8 * stage, parity ^ 1); }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    // By all threads of a warp.
    __device__ __forceinline__ void leave(int of) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty + 8 * of);
    }
};

// ---- Products -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until no more than `left` groups of products are on their way.
template <int left>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Sums that products write may be read or copied from here on, and not before.
template <int count>
__device__ __forceinline__ void settle(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Core matrices without a swizzle; distances in bytes along the contraction and along the columns.
__device__ __forceinline__ u64 matrix(u32 shared, int along_contraction, int along_columns) {
    return (u64)(shared >> 4) | (u64)(along_contraction >> 4) << 16 | (u64)(along_columns >> 4) << 32;
}

#define F4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F16(x, i) F4(x, i), F4(x, i + 4), F4(x, i + 8), F4(x, i + 12)

// 16 of head_dim: rows by the 64 keys of a pair.
__device__ __forceinline__ void multiply_keys(float (&s)[32], u64 query, u64 keys, int added) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, "
        "p, 1, 1, 0, 0;\n}"
        : F16(s, 0), F16(s, 16)
        : "l"(query), "l"(keys), "r"(added));
}

// 16 keys: rows by head_dim, added to O.
__device__ __forceinline__ void multiply_values(float (&o)[PER_THREAD], const u32 (&p)[4], u64 values) {
#if HEAD_DIM == 64
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
        "%35}, %36, 1, 1, 1, 0;"
        : F16(o, 0), F16(o, 16)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(values));
#else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : F16(o, 0), F16(o, 16), F16(o, 32), F16(o, 48)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(values));
#endif
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
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(by));
    return y;
}

__device__ __forceinline__ u32 twice_half(float x) {
    u32 y;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b32 %0, {h, h}; }" : "=r"(y) : "f"(x));
    return y;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// A strand's maximum and sums of this thread's two rows: of P as it is rounded, which divides O, and as it is not, whose
// logarithm the backward takes. Sums are of this thread's columns; the maximum is of all.
struct Sums {
    float maximum[2], sum[2], exact[2];
};

__device__ __forceinline__ Sums no_sums() { return {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {0.0f, 0.0f}}; }

// From scores of a tile to P, and the sums relative to the new maximum; returns whether that of a row of the warp was
// raised, and by which factor. As `soften` of decode_attention.cu. P is as wgmma takes it: [16 keys][rows g and g + 8 of
// keys 2c and 2c + 1, then of keys 2c + 8 and 2c + 9].
template <int tile>
__device__ __forceinline__ bool soften(Sums& sums, float (&factor)[2], u32 (&p)[4][4], float (&s)[32], float scale) {
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = minus_infinity();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[16 * tile + 4 * t + 2 * r + i];
                x *= scale;
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
        sums.exact[r] *= factor[r];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float* const x = s + 16 * tile + 4 * t + 2 * r;
            const float first = exp2_approximate(x[0] - base + P_EXPONENT), second = exp2_approximate(x[1] - base + P_EXPONENT);
            u32& pair = p[2 * tile + t / 2][t % 2 * 2 + r];
            pair = round_weights(first, second);
            sums.sum[r] += sum_of_half2(pair);
            sums.exact[r] += first + second;
        }
    }
    return __any_sync(FULL_WARP, raised);
}

// No score for keys that a row does not see: of either tile it sees `left`.
__device__ __forceinline__ void mask(float (&s)[32], const int (&left)[2][2], int c) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (i / 4 % 4 * 8 + 2 * c + i % 2 >= left[i / 16][i / 2 % 2]) s[i] = minus_infinity();
}

__device__ __forceinline__ void rescale(float (&o)[PER_THREAD], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) o[i] *= factor[i / 2 % 2];
}

// In the order of the source: what is read early takes registers.
__device__ __forceinline__ float4 read_in_order(const float4* at) {
    float4 x;
    asm volatile("ld.volatile.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at));
    return x;
}

__device__ __forceinline__ void write_in_order(float4* at, float x, float y, float z, float w) {
    asm volatile("st.volatile.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Strands, or partitions, that were merged. O is [FOURS][threads] of four numbers in memory, each thread its own.
struct Merged {
    float4* o;
    Sums sums;  // Of whole rows.
    bool none;

    __device__ __forceinline__ explicit Merged(float4* at) : o(at), sums(no_sums()), none(true) {}

    // With one part more, of which `more` gives the four numbers i.
    template <typename Four>
    __device__ __forceinline__ void add(const Four& more, const Sums& with) {
        const Merging merging[2] = {{sums.maximum[0], with.maximum[0]}, {sums.maximum[1], with.maximum[1]}};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sums.sum[r] = merging[r].of(sums.sum[r], with.sum[r]);
            sums.exact[r] = merging[r].of(sums.exact[r], with.exact[r]);
            sums.maximum[r] = merging[r].maximum;
        }
#pragma unroll
        for (int first = 0; first < FOURS; first += 4) {
            float4 old[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                old[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (!none) old[i] = read_in_order(o + (first + i) * 128 * WARPGROUPS);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 x = more(first + i);
                write_in_order(o + (first + i) * 128 * WARPGROUPS, merging[0].of(old[i].x, x.x), merging[0].of(old[i].y, x.y),
                               merging[1].of(old[i].z, x.z), merging[1].of(old[i].w, x.w));
            }
        }
        none = false;
    }
};

// One piece of work: tokens side by side of one sequence.
struct Work {
    int pair;    // the first of the sequence's pairs
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

// This thread's share of the query of a warpgroup, in FP16 as wgmma reads it: [pieces of head_dim][8][8 rows][8].
__device__ __forceinline__ void write_query(u8* to, const u8* (&from)[2], const int (&seen)[2]) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u32* const at = reinterpret_cast<u32*>(to) + (2 * warp + r) * 32 + g * 4 + c;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 64; ++j) {
            const Sixteen x = seen[r] > 0 ? load_query(from[r] + (64 * j + 16 * c) * QUERY_BYTES) : Sixteen{};
#pragma unroll
            for (int i = 0; i < 8; ++i) at[(8 * j + i) * 256] = x.pairs[i];
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Whether P of the first tile stays exact in FP16 when it follows a maximum that the second raised. That of E4M3 does
// where it rose by no more than 15; bits of FP16 may be lost before.
__device__ __forceinline__ bool stays_exact(const u32 (&p)[4][4], const float (&factor)[2], const u32 (&by)[2]) {
    bool exact = fminf(factor[0], factor[1]) >= 0x1p-15f;
#if PRODUCTS_16
    const u32 back[2] = {twice_half(1.0f / factor[0]), twice_half(1.0f / factor[1])};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        exact &= multiply_half2(multiply_half2(p[i / 4][i % 4], by[i % 2]), back[i % 2]) == p[i / 4][i % 4];
#endif
    return exact;
}

// From scores of a pair to P, with O relative to the maximum after it. Where P of the first tile does not stay exact,
// this warp multiplies that tile by itself.
__device__ __forceinline__ void to_weights(
    float (&o)[PER_THREAD], u32 (&p)[4][4], Sums& sums, float (&s)[32], float scale, const Queue& values, const u8* memory) {
    float factor[2][2];
    const bool raised = soften<0>(sums, factor[0], p, s, scale), raised_again = soften<1>(sums, factor[1], p, s, scale);
    if (raised) rescale(o, factor[0]);
    if (!raised_again) return;
    const u32 by[2] = {twice_half(factor[1][0]), twice_half(factor[1][1])};
    if (__any_sync(FULL_WARP, !stays_exact(p, factor[1], by))) {
        values.wait_until_full();
        const u8* const at = memory + values.stage * IMAGE + threadIdx.x % 32 * 4;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                const u32 low = *reinterpret_cast<const u32*>(at + 2 * k * EIGHT_KEYS + n * 128);
                const u32 high = *reinterpret_cast<const u32*>(at + (2 * k + 1) * EIGHT_KEYS + n * 128);
                multiply_alone(o + 4 * n, p[k], low, high);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = 0;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = multiply_half2(p[i / 4][i % 4], by[i % 2]);
    }
    rescale(o, factor[1]);
}

__device__ __forceinline__ void copy_pairs(
    Queue queue, const u8* images, i64 pairs, const int4* work, int all, int kv_heads) {
    for (int index = blockIdx.x; index < all; index += gridDim.x) {
        const int4 piece = work[index / kv_heads];
        const u8* const first = images + (index % kv_heads * pairs + piece.x) * PAIR_BYTES;
        for (Order order(piece.z + piece.w - 1); !order.done(); order.next()) {
            for (int half = 0; half < 2; ++half, queue.next()) {
                queue.wait_until_empty();
                copy_image(queue.image(), first + (i64)order.image() * PAIR_BYTES + half * IMAGE, queue.full + 8 * queue.stage);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) sequence_attention(
    const u8* __restrict__ query, i64 query_stride, const u8* __restrict__ images, i64 pairs, const int4* __restrict__ work,
    i64 pieces, i64 kv_heads, const float* __restrict__ query_scale, const float* __restrict__ key_scale,
    const float* __restrict__ value_scale, float softmax_scale, u16* __restrict__ output, i64 output_stride,
    float* __restrict__ logsumexp, i64 logsumexp_stride, float4* __restrict__ of_partitions) {
    extern __shared__ __align__(1024) u8 memory[];  // [STAGES] images, Q, then O of merged strands
    __shared__ u64 barriers[2 * STAGES];
    Queue queue(memory, barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            initialise(queue.full + 8 * i, 1);
            initialise(queue.empty + 8 * i, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int heads = (int)kv_heads, all = (int)pieces * heads;
    if (threadIdx.x >= 128 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 128 * WARPGROUPS) copy_pairs(queue, images, pairs, work, all, heads);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int group = threadIdx.x / 128, c = threadIdx.x % 4, first_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float scale = scale_of_scores(softmax_scale, query_scale, key_scale);
    u8* const own_query = memory + STAGES * IMAGE + group * 64 * HEAD_DIM * 2;
    const u32 own_rows = (u32)__cvta_generic_to_shared(own_query);
    for (int index = blockIdx.x; index < all; index += gridDim.x) {
        const int4 loaded = work[index / heads];
        const Work piece = {loaded.x, loaded.y, loaded.z, loaded.w};
        int seen[2], token[2], own_head[2];
        const u8* from[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 8 * r;
            token[r] = piece.row + row / GROUP;
            own_head[r] = index % heads * GROUP + row % GROUP;
            seen[r] = row / GROUP < piece.tokens ? piece.seen + row / GROUP : 0;
            from[r] = query + ((i64)token[r] * query_stride + own_head[r] * HEAD_DIM) * QUERY_BYTES;
        }
        write_query(own_query, from, seen);
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
        // Of this warpgroup's rows: the most keys that one sees, and the least.
        const int last = min(piece.tokens, (64 * group + 63) / GROUP + 1), before = 64 * group / GROUP;
        const int end = before < last ? piece.seen + last - 1 : 0;
        const int least = 64 * group + 63 < piece.tokens * GROUP ? piece.seen + before : 0;

        float o[PER_THREAD], s[32];
        u32 p[4][4];
        Sums sums = no_sums();
        Merged strands(reinterpret_cast<float4*>(memory + STAGES * IMAGE + ROWS * HEAD_DIM * 2) + threadIdx.x);
        Merged partitions(of_partitions + blockIdx.x * FOURS * 128 * WARPGROUPS + threadIdx.x);
        int strand = 0, part = 0, values = -1;
        const auto nothing_yet = [&]() {
            sums = no_sums();
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) o[i] = 0.0f;
        };
        const auto end_strand = [&](bool part_ends) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sums.sum[r] += __shfl_xor_sync(FULL_WARP, sums.sum[r], 1);
                sums.sum[r] += __shfl_xor_sync(FULL_WARP, sums.sum[r], 2);
                sums.exact[r] += __shfl_xor_sync(FULL_WARP, sums.exact[r], 1);
                sums.exact[r] += __shfl_xor_sync(FULL_WARP, sums.exact[r], 2);
            }
            strands.add([&](int i) { return make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]); }, sums);
            if (!part_ends || !of_partitions) return;
            partitions.add([&](int i) { return read_in_order(strands.o + i * 128 * WARPGROUPS); }, strands.sums);
            strands = Merged(strands.o);
        };
        nothing_yet();
        for (Order order(piece.seen + piece.tokens - 1); !order.done(); order.next()) {
            queue.wait_until_full();
            const int first = order.first_key(), second = order.has_second() ? first + APART : end;
            if (first >= end) {
                // Values that stayed here would keep the warp that copies from going on, within STAGES images.
                if (values >= 0) {
                    wait_for_products<0>();
                    settle(o);
                    queue.leave(values);
                    values = -1;
                }
                for (int half = 0; half < 2; ++half, queue.next()) {
                    queue.wait_until_full();
                    queue.leave(queue.stage);
                }
                continue;
            }
            begin_products();
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; ++k)
                multiply_keys(s, matrix(own_rows + k * 2048, 1024, 128), matrix(queue.image() + k * 2048, 1024, 128), k);
            end_products();
            // With them end those of the values before.
            wait_for_products<0>();
            settle(s);
            settle(o);
            if (values >= 0) queue.leave(values);
            queue.leave(queue.stage);
            queue.next();
            values = queue.stage;
            if (order.strand != strand || order.part != part) {
                end_strand(order.part != part);
                strand = order.strand;
                part = order.part;
                nothing_yet();
            }
            if (second + TILE > least) {
                const int left[2][2] = {{seen[0] - first, seen[1] - first}, {seen[0] - second, seen[1] - second}};
                mask(s, left, c);
            }
            to_weights(o, p, sums, s, scale, queue, memory);
            queue.wait_until_full();
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply_values(o, p[k], matrix(queue.image() + 2 * k * EIGHT_KEYS, EIGHT_KEYS, 128));
            end_products();
            queue.next();
        }
        wait_for_products<0>();
        settle(o);
        if (values >= 0) queue.leave(values);
        if (end > 0) end_strand(true);
        const float4* const result = of_partitions ? partitions.o : strands.o;
        float unit[2];
        u16* to[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float maximum = of_partitions ? partitions.sums.maximum[r] : strands.sums.maximum[r];
            const float exact = of_partitions ? partitions.sums.exact[r] : strands.sums.exact[r];
            unit[r] = *value_scale / (of_partitions ? partitions.sums.sum[r] : strands.sums.sum[r]);
            to[r] = output + (i64)token[r] * output_stride + own_head[r] * HEAD_DIM + 2 * c;
            if (c == 0 && logsumexp && seen[r] > 0)
                logsumexp[own_head[r] * logsumexp_stride + token[r]] = (maximum - P_EXPONENT + log2f(exact)) * 0.6931471805599453f;
        }
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const float4 x = read_in_order(result + i * 128 * WARPGROUPS);
            if (seen[0] > 0) *reinterpret_cast<u32*>(to[0] + 8 * i) = to_bf16x2(x.x * unit[0], x.y * unit[0]);
            if (seen[1] > 0) *reinterpret_cast<u32*>(to[1] + 8 * i) = to_bf16x2(x.z * unit[1], x.w * unit[1]);
        }
    }
}
