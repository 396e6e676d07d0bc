// Attention of single tokens over a paged FP8 cache. See decode_attention.py for what it computes and why.
//
// A block serves one token, one KV head and one partition of the keys; each of its warps takes every fourth tile of 32
// keys, through a queue of its own in shared memory: no warp waits for another. Neighbouring lanes copy a whole row,
// because the L2 cache gives up at half of the memory's bandwidth when it is asked for less than 128 bytes at a time. The
// contraction of either product may be taken in any order, so a thread reads 16 bytes at a time that are its fragments as
// they are; only V needs its bytes interleaved, two keys at a time. sequence_attention.cu repeats this arithmetic.
//
// mma.m16n8k16, lane = 4 * g + c:
//   scores   S = Q K^T    rows: query heads (8 of 16 used), columns: 8 keys, contraction: head_dim
//   values   O^T = V^T P^T  rows: 16 of head_dim, columns: query heads, contraction: 16 keys
// A thread has the scores of row g for keys 2c and 2c + 1 of each 8, which is what the second product wants of it.
//
// Compiled with GROUP (query heads per KV head, at most 8), PAGE (keys of a cache block, a multiple of 16), PARTITION
// (keys of a partition, a multiple of 32) and the cache's strides in bytes (BLOCK_STRIDE, KEY_STRIDE, HEAD_STRIDE)
// defined. RESIDENT is the number of blocks per multiprocessor that registers are shared out for, STAGES the tiles of a
// warp in shared memory.

#define WARPS 4
#define ROW (HEAD_DIM / 16)       // pieces of 16 bytes of a row of keys or values
#define AT_ONCE (32 / ROW)        // rows that a warp copies at once
#define STAGE (2 * TILE * ROW)    // of a tile: its keys, then its values
#define SHARE (HEAD_DIM / 8)      // of a row of values: what a lane multiplies
#define EVERY (32 * WARPS / HEAD_DIM)  // rows of O that a block merges at once

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

// What a warp has seen of its tiles. O is [head_dim / 16][4]: (d, row 2c), (d, 2c + 1), (d + 1, 2c), (d + 1, 2c + 1)
// with d = SHARE g + 2 i. The maximum and the sum belong to row g; the maximum is a whole power of two.
struct State {
    float o[HEAD_DIM / 16][4];
    float maximum;
    float sum;
};

// Where a piece lies in its row in shared memory, so that the lanes that read or write at once use as many banks as they
// can. Two rows of four pieces use all of them as they are.
__device__ __forceinline__ int key_piece(int row, int piece) {
    return row * ROW + (ROW == 8 ? piece ^ ((row & 1) << 2) : piece);
}
__device__ __forceinline__ int value_piece(int row, int piece) {
    return (TILE + row) * ROW + (piece ^ (ROW == 8 ? row & 6 : row / 2 % 4));
}

// Copy a tile, AT_ONCE rows at a time; addresses are those of this lane's piece in the first row of each half of 16 keys,
// which lie within one cache block.
__device__ __forceinline__ void copy_tile(uint4* stage, const u8* const (&keys)[2], const u8* const (&values)[2], int lane) {
#pragma unroll
    for (int i = 0; i < TILE / AT_ONCE; ++i) {
        const int first = AT_ONCE * i, row = first + lane / ROW, offset = first % 16 * KEY_STRIDE;
        copy16(stage + key_piece(row, lane % ROW), keys[first / 16] + offset);
        copy16(stage + value_piece(row, lane % ROW), values[first / 16] + offset);
    }
}

// Scores of row g for keys 2c and 2c + 1 of each 8, in powers of two.
__device__ __forceinline__ void multiply_keys(
    float (&s)[4][4], const u32 (&query)[HEAD_DIM / 16][2], const uint4* stage, int g, int c) {
#pragma unroll
    for (int t = 0; t < 4; ++t) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 64; ++j) {
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
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
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
        p[t] = round_weights(first, second);
        state.sum += sum_of_half2(p[t]);
    }
}

// A lane's share of the values of a key.
struct Share {
    u32 words[HEAD_DIM / 32];
};

__device__ __forceinline__ Share share_of(const uint4* stage, int row, int g) {
#if HEAD_DIM == 128
    const uint4 x = stage[value_piece(row, g)];
    return {{x.x, x.y, x.z, x.w}};
#else
    const uint4 x = stage[value_piece(row, g / 2)];
    return g % 2 == 0 ? Share{{x.x, x.y}} : Share{{x.z, x.w}};
#endif
}

__device__ __forceinline__ void multiply_values(
    State& state, const u32 (&p)[4], const uint4* stage, int left, int g, int c) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        Share v[2][2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = 16 * u + 8 * t + 2 * c + j;
                v[t][j] = share_of(stage, row, g);
                // What was never written may be NaN, and 0 * NaN is not 0.
                if (row >= left) v[t][j] = Share{};
            }
        }
#pragma unroll
        for (int w = 0; w < HEAD_DIM / 32; ++w) {
            const u32 a = v[0][0].words[w], b = v[0][1].words[w], e = v[1][0].words[w], f = v[1][1].words[w];
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

__device__ __forceinline__ Merged with_part(const Merged& merged, float o, float maximum, float sum) {
    const Merging merging(merged.maximum, maximum);
    return {merging.of(merged.o, o), merging.maximum, merging.of(merged.sum, sum)};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) decode_attention(
    const u8* __restrict__ query, i64 query_stride, const u8* __restrict__ keys, const u8* __restrict__ values,
    const int* __restrict__ block_table, i64 table_stride, const int* __restrict__ starts, const int* __restrict__ lengths,
    const float* __restrict__ query_scale, const float* __restrict__ key_scale, const float* __restrict__ value_scale,
    float softmax_scale, u16* __restrict__ output, i64 output_stride, float* __restrict__ partial,
    int* __restrict__ arrived) {
    extern __shared__ uint4 queue[];  // [WARPS][STAGES][STAGE], and after the last tile O of every warp
    float(*const shared_o)[GROUP][HEAD_DIM] = reinterpret_cast<float(*)[GROUP][HEAD_DIM]>(queue);
    __shared__ float shared_maximum[WARPS][8], shared_sum[WARPS][8];
    __shared__ bool last;
    const int head = blockIdx.x, own = blockIdx.y, part = blockIdx.z, begin = part * PARTITION;
    const int warp = threadIdx.x / 32, g = (threadIdx.x % 32) / 4, c = threadIdx.x % 4;
    const float scale = scale_of_scores(softmax_scale, query_scale, key_scale);
    // Of the rows that this thread merges: its element, and the first.
    const int element = threadIdx.x % HEAD_DIM, first_row = threadIdx.x / HEAD_DIM;
    // Keys that this query sees; -1 for one that is left out.
    const int seen = starts[own + 1] - starts[own] == 1 ? lengths[own] : -1;
    const auto row_of = [&](int h) {
        return output + (i64)starts[own] * output_stride + (head * GROUP + h) * HEAD_DIM + element;
    };
    if (part == 0 && seen == 0)
        for (int h = first_row; h < GROUP; h += EVERY) *row_of(h) = 0;
    if (begin >= seen) return;
    const int end = min(seen, begin + PARTITION), parts = (seen + PARTITION - 1) / PARTITION;

    u32 q[HEAD_DIM / 16][2];
    {
        const i64 first = starts[own] * query_stride + (head * GROUP + g) * HEAD_DIM + 16 * c;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 64; ++j) {
            const Sixteen x = g < GROUP ? load_query(query + (first + 64 * j) * QUERY_BYTES) : Sixteen{};
#pragma unroll
            for (int i = 0; i < 8; ++i) q[4 * j + i / 2][i % 2] = x.pairs[i];
        }
    }
    const int* const blocks = block_table + own * table_stride;
    State state;
    state.maximum = minus_infinity();
    state.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0.0f;

    // Keys after the last are read from its block's memory, and masked. Blocks are looked up one tile before they are
    // needed.
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
        soften(state, p, s, scale, end - start, c);
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
        if (2 * c + h < GROUP) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; ++i)
                *reinterpret_cast<float2*>(&shared_o[warp][2 * c + h][SHARE * g + 2 * i]) =
                    make_float2(state.o[i][h], state.o[i][2 + h]);
        }
    }
    __syncthreads();
    float* const own_partial = partial + ((i64)own * gridDim.x + head) * gridDim.z * GROUP * (HEAD_DIM + 2);
    for (int h = first_row; h < GROUP; h += EVERY) {
        Merged merged = nothing();
        for (int w = 0; w < WARPS; ++w)
            merged = with_part(merged, shared_o[w][h][element], shared_maximum[w][h], shared_sum[w][h]);
        if (parts == 1) {
            *row_of(h) = to_bf16(merged.o * (*value_scale / merged.sum));
        } else {
            float* const at = own_partial + (part * GROUP + h) * (HEAD_DIM + 2);
            at[element] = merged.o;
            if (element < 2) at[HEAD_DIM + element] = element == 0 ? merged.maximum : merged.sum;
        }
    }
    if (parts == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* const counter = arrived + own * gridDim.x + head;
        last = atomicAdd(counter, 1) == parts - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    // The last block that arrives merges all of them, in the order of the keys.
    for (int h = first_row; h < GROUP; h += EVERY) {
        Merged merged = nothing();
        const float* at = own_partial + h * (HEAD_DIM + 2);
        for (int i = 0; i < parts; ++i, at += GROUP * (HEAD_DIM + 2))
            merged = with_part(merged, __ldcg(at + element), __ldcg(at + HEAD_DIM), __ldcg(at + HEAD_DIM + 1));
        *row_of(h) = to_bf16(merged.o * (*value_scale / merged.sum));
    }
}
