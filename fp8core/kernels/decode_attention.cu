// Attention of single tokens over a paged FP8 cache. See decode_attention.py for what it computes and why.
//
// A block serves one token, or TOKENS side by side, one KV head and one partition of the keys; each of its warps takes every fourth tile of 32
// keys, through a queue of its own in shared memory: no warp waits for another. Eight neighbouring lanes copy a whole row
// of 128 bytes, because the L2 cache gives up at half of the memory's bandwidth when it is asked for less at a time. The
// contraction of either product may be taken in any order, so a thread reads 16 bytes at a time that are its fragments as
// they are; only V needs its bytes interleaved, two keys at a time.
//
// mma.m16n8k16, lane = 4 * g + c:
//   scores   S = Q K^T    rows: query heads of all tokens (8 of 16 used), columns: 8 keys, contraction: head_dim
//   values   O^T = V^T P^T  rows: 16 of head_dim, columns: query heads of all tokens, contraction: 16 keys
// A thread has the scores of row g for keys 2c and 2c + 1 of each 8, which is what the second product wants of it.
//
// Tokens of one sequence share what is read of its keys; a block whose tokens belong to several takes these in turn. Each
// query head of each token is a row of its own, and what it computes does not depend on the others.
//
// Compiled with GROUP (query heads per KV head), TOKENS (GROUP * TOKENS is at most 8), PAGE (keys of a cache block, a multiple of 16), PARTITION
// (keys of a partition, a multiple of 32) and the cache's strides in bytes (BLOCK_STRIDE, KEY_STRIDE, HEAD_STRIDE)
// defined. RESIDENT is the number of blocks per multiprocessor that registers are shared out for, STAGES the tiles of a
// warp in shared memory.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define HEAD_DIM 128
#define ROWS (GROUP * TOKENS)
#define WARPS 4
#define TILE 32
#define ROW 8                    // pieces of 16 bytes of a row of keys or values
#define STAGE (2 * TILE * ROW)  // of a tile: its keys, then its values
#define FULL_WARP 0xffffffffu
// FlashAttention 3 stores P times 256 in E4M3.
#define P_EXPONENT 8.0f

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint4 load16(const u8* address) { return *reinterpret_cast<const uint4*>(address); }

__device__ __forceinline__ void copy16(uint4* shared, const u8* global) {
    const u32 address = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than `left` groups of this thread's copies are on their way.
template <int left>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
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

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// What a warp has seen of its tiles. O is [head_dim / 16][4]: (d, row 2c), (d, 2c + 1), (d + 1, 2c), (d + 1, 2c + 1)
// with d = 16 g + 2 i. The maximum and the sum belong to row g; the maximum is a whole power of two.
struct State {
    float o[8][4];
    float maximum;
    float sum;
};

// Where a piece lies in its row in shared memory, so that the eight lanes that read or write at once use all banks.
__device__ __forceinline__ int key_piece(int row, int piece) { return row * ROW + (piece ^ ((row & 1) << 2)); }
__device__ __forceinline__ int value_piece(int row, int piece) { return (TILE + row) * ROW + (piece ^ (row & 6)); }

// Copy a tile, four rows at a time; addresses are those of this lane's piece in the first row of each half of 16 keys,
// which lie within one cache block.
__device__ __forceinline__ void copy_tile(uint4* stage, const u8* const (&keys)[2], const u8* const (&values)[2], int lane) {
#pragma unroll
    for (int i = 0; i < TILE / 4; ++i) {
        const int row = 4 * i + lane / ROW, offset = 4 * (i % 4) * KEY_STRIDE;
        copy16(stage + key_piece(row, lane % ROW), keys[i / 4] + offset);
        copy16(stage + value_piece(row, lane % ROW), values[i / 4] + offset);
    }
}

// Scores of row g for keys 2c and 2c + 1 of each 8, in powers of two.
__device__ __forceinline__ void multiply_keys(
    float (&s)[4][4], const u32 (&query)[8][2], const uint4* stage, int g, int c) {
#pragma unroll
    for (int t = 0; t < 4; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint4 k[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) k[t] = stage[key_piece(8 * t + g, 4 * j + c)];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32(&q)[2] = query[4 * j + i];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const u32 word = word_of(k[t], i);
                multiply(s[t], q[0], 0u, q[1], 0u, low_to_half2(word), high_to_half2(word));
            }
        }
    }
}

// From scores to P, and everything so far relative to the new maximum. `left` keys of the tile are this row's.
__device__ __forceinline__ void soften(State& state, u32 (&p)[4], float (&s)[4][4], float scale, int left, int c) {
    float highest = minus_infinity();
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[t][i] = 8 * t + 2 * c + i < left ? s[t][i] * scale : minus_infinity();
            highest = fmaxf(highest, s[t][i]);
        }
    }
    highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 2));
    const float maximum = fmaxf(state.maximum, ceilf(highest));
    // A row that has seen no key yet: all of its P are 0.
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    if (__any_sync(FULL_WARP, maximum > state.maximum)) {
        const float factor = exp2_approximate(state.maximum - base);
        const float even = __shfl_sync(FULL_WARP, factor, 8 * c), odd = __shfl_sync(FULL_WARP, factor, 8 * c + 4);
        state.maximum = maximum;
        state.sum *= factor;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            state.o[i][0] *= even;
            state.o[i][1] *= odd;
            state.o[i][2] *= even;
            state.o[i][3] *= odd;
        }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const float first = exp2_approximate(s[t][0] - base + P_EXPONENT);
        const float second = exp2_approximate(s[t][1] - base + P_EXPONENT);
        p[t] = round_to_e4m3(first, second);
        state.sum += sum_of_half2(p[t]);
    }
}

__device__ __forceinline__ void multiply_values(
    State& state, const u32 (&p)[4], const uint4* stage, int left, int g, int c) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        uint4 v[2][2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = 16 * u + 8 * t + 2 * c + j;
                v[t][j] = stage[value_piece(row, g)];
                // What was never written may be NaN, and 0 * NaN is not 0.
                if (row >= left) v[t][j] = make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const u32 a = word_of(v[0][0], w), b = word_of(v[0][1], w);
            const u32 e = word_of(v[1][0], w), f = word_of(v[1][1], w);
            // Two keys at a time: bytes 0 and 1 of both, then 2 and 3.
            const u32 near_low = __byte_perm(a, b, 0x5140), near_high = __byte_perm(a, b, 0x7362);
            const u32 far_low = __byte_perm(e, f, 0x5140), far_high = __byte_perm(e, f, 0x7362);
            multiply(state.o[2 * w], low_to_half2(near_low), high_to_half2(near_low), low_to_half2(far_low),
                     high_to_half2(far_low), p[2 * u], p[2 * u + 1]);
            multiply(state.o[2 * w + 1], low_to_half2(near_high), high_to_half2(near_high), low_to_half2(far_high),
                     high_to_half2(far_high), p[2 * u], p[2 * u + 1]);
        }
    }
}

// One element of O over parts of the keys that were merged in their order, with the row's maximum and sum.
struct Merged {
    float o, maximum, sum;
};

__device__ __forceinline__ Merged nothing() { return {0.0f, minus_infinity(), 0.0f}; }

// With one part more, by the roundings that sequence_attention.cu has.
__device__ __forceinline__ Merged with_part(const Merged& merged, float o, float maximum, float sum) {
    const float highest = fmaxf(merged.maximum, maximum);
    // A row that has seen no key yet: all of it is 0.
    const float base = highest == minus_infinity() ? 0.0f : highest;
    const float before = exp2_approximate(merged.maximum - base), of_more = exp2_approximate(maximum - base);
    return {__fmaf_rn(o, of_more, __fmul_rn(merged.o, before)), highest, __fmaf_rn(sum, of_more, __fmul_rn(merged.sum, before))};
}

// Keys that a query sees; -1 for one that is left out.
__device__ __forceinline__ int keys_of(int query, const int* starts, const int* lengths) {
    return starts[query + 1] - starts[query] == 1 ? lengths[query] : -1;
}

__device__ __forceinline__ int parts_of(int keys) { return (keys + PARTITION - 1) / PARTITION; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) decode_attention(
    const u8* __restrict__ query, i64 query_stride, const u8* __restrict__ keys, const u8* __restrict__ values,
    i64 queries, const int* __restrict__ block_table, i64 table_stride, const int* __restrict__ owners,
    const int* __restrict__ starts, const int* __restrict__ lengths, const float* __restrict__ query_scale,
    const float* __restrict__ key_scale, const float* __restrict__ value_scale, float softmax_scale,
    u16* __restrict__ output, i64 output_stride, float* __restrict__ partial, int* __restrict__ arrived) {
    extern __shared__ uint4 queue[];  // [WARPS][STAGES][STAGE], and after the last tile O of every warp
    float(*const shared_o)[ROWS][HEAD_DIM] = reinterpret_cast<float(*)[ROWS][HEAD_DIM]>(queue);
    __shared__ float shared_maximum[WARPS][8], shared_sum[WARPS][8];
    __shared__ bool last;
    const int head = blockIdx.x, part = blockIdx.z, begin = part * PARTITION;
    const int warp = threadIdx.x / 32, g = (threadIdx.x % 32) / 4, c = threadIdx.x % 4;
    const float scale = softmax_scale * 1.4426950408889634f * *query_scale * *key_scale;
    const int stop = min((int)queries, (int)(blockIdx.y + 1) * TOKENS);
    const auto row_of = [&](int of, int h) {
        return output + (i64)starts[of] * output_stride + (head * GROUP + h) * HEAD_DIM + threadIdx.x;
    };
    const auto partial_of = [&](int of) {
        return partial + ((i64)of * gridDim.x + head) * gridDim.z * GROUP * (HEAD_DIM + 2);
    };

    for (int first = blockIdx.y * TOKENS, next; first < stop; first = next) {
        next = first + 1;
        if (TOKENS > 1)
            while (next < stop && owners[next] == owners[first]) ++next;
        int longest = -1;
        for (int i = first; i < next; ++i) longest = max(longest, keys_of(i, starts, lengths));
        if (part == 0) {
            for (int i = first; i < next; ++i)
                if (keys_of(i, starts, lengths) == 0)
                    for (int h = 0; h < GROUP; ++h) *row_of(i, h) = 0;
        }
        if (begin >= longest) continue;
        const int end = min(longest, begin + PARTITION), parts = parts_of(longest);

        // This thread's row: head g % GROUP of a token.
        const int own = first + g / GROUP, seen = g < ROWS && own < next ? keys_of(own, starts, lengths) : 0;
        const int own_end = min(seen, end);
        u32 q[8][2];
        {
            const u8* at = query + (seen > 0 ? starts[own] : 0) * query_stride + (head * GROUP + g % GROUP) * HEAD_DIM + 16 * c;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 x = seen > 0 ? load16(at + 64 * j) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    q[4 * j + i][0] = low_to_half2(word_of(x, i));
                    q[4 * j + i][1] = high_to_half2(word_of(x, i));
                }
            }
        }
        const int* const blocks = block_table + owners[first] * table_stride;
        State state;
        state.maximum = minus_infinity();
        state.sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0.0f;

        // Keys after the last are read from its block's memory, and masked. Blocks are looked up one tile before they
        // are needed.
        const int last_key = end - 1, stride = WARPS * TILE, tile = begin + warp * TILE;
        const int lane = threadIdx.x % 32, piece = head * HEAD_STRIDE + lane / ROW * KEY_STRIDE + 16 * (lane % ROW);
        uint4* const own_queue = queue + warp * STAGES * STAGE;
        const u8 *const own_keys = keys + piece, *const own_values = values + piece;
        int ahead = tile, into = 0;
        int block[2] = {blocks[min(tile, last_key) / PAGE], blocks[min(tile + 16, last_key) / PAGE]};
        const auto copy_next = [&]() {
            if (ahead < end) {
                const u8 *k_at[2], *v_at[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const i64 offset = (i64)block[j] * BLOCK_STRIDE + (ahead + 16 * j) % PAGE * KEY_STRIDE;
                    k_at[j] = own_keys + offset;
                    v_at[j] = own_values + offset;
                    block[j] = blocks[min(ahead + stride + 16 * j, last_key) / PAGE];
                }
                copy_tile(own_queue + into * STAGE, k_at, v_at, lane);
            }
            end_of_copies();
            ahead += stride;
            into = into + 1 == STAGES ? 0 : into + 1;
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy_next();
        int from = 0;
        for (int start = tile; start < end; start += stride) {
            copy_next();
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            const uint4* const stage = own_queue + from * STAGE;
            from = from + 1 == STAGES ? 0 : from + 1;
            float s[4][4];
            u32 p[4];
            multiply_keys(s, q, stage, g, c);
            soften(state, p, s, scale, own_end - start, c);
            multiply_values(state, p, stage, end - start, g, c);
            __syncwarp();  // The stage is copied to next.
        }
        __syncthreads();  // The queue is reused.

        float sum = state.sum + __shfl_xor_sync(FULL_WARP, state.sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (c == 0) {
            shared_maximum[warp][g] = state.maximum;
            shared_sum[warp][g] = sum;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (2 * c + h < ROWS) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    *reinterpret_cast<float2*>(&shared_o[warp][2 * c + h][16 * g + 2 * i]) =
                        make_float2(state.o[i][h], state.o[i][2 + h]);
            }
        }
        __syncthreads();
        for (int r = 0; r < ROWS; ++r) {
            const int of = first + r / GROUP, h = r % GROUP;
            if (of >= next || keys_of(of, starts, lengths) <= begin) continue;
            Merged merged = nothing();
            for (int w = 0; w < WARPS; ++w)
                merged = with_part(merged, shared_o[w][r][threadIdx.x], shared_maximum[w][r], shared_sum[w][r]);
            if (parts == 1) {
                *row_of(of, h) = to_bf16(merged.o * (*value_scale / merged.sum));
            } else {
                float* const at = partial_of(of) + (part * GROUP + h) * (HEAD_DIM + 2);
                at[threadIdx.x] = merged.o;
                if (threadIdx.x < 2) at[HEAD_DIM + threadIdx.x] = threadIdx.x == 0 ? merged.maximum : merged.sum;
            }
        }
        if (parts > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int* const counter = arrived + first * gridDim.x + head;
                last = atomicAdd(counter, 1) == parts - 1;
                if (last) *counter = 0;
            }
            __syncthreads();
            if (last) {
                __threadfence();
                // The last block that arrives adds all of them up, in the order of the keys.
                for (int r = 0; r < ROWS; ++r) {
                    const int of = first + r / GROUP, h = r % GROUP;
                    const int own_parts = of < next ? parts_of(keys_of(of, starts, lengths)) : 0;
                    if (own_parts == 0) continue;
                    Merged merged = nothing();
                    const float* at = partial_of(of) + h * (HEAD_DIM + 2);
                    const i64 step = GROUP * (HEAD_DIM + 2);
                    for (int i = 0; i < own_parts; ++i, at += step)
                        merged = with_part(merged, __ldcg(at + threadIdx.x), __ldcg(at + HEAD_DIM), __ldcg(at + HEAD_DIM + 1));
                    *row_of(of, h) = to_bf16(merged.o * (*value_scale / merged.sum));
                }
            }
        }
        if (TOKENS > 1) __syncthreads();  // Shared memory is reused by the next tokens.
    }
}
