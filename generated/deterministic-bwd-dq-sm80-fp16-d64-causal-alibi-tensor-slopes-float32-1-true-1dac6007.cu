// flashgen: attention backward, dq, fp16-d64-causal-alibi-tensor-slopes-float32-1-true-1dac6007
// Computes dQ; a CTA iterates over the keys of a query tile.
//
// mask     causal()
// score    alibi(Tensor('slopes', 'float32', ndim=1, grad=True)); scale 0.125
// dropout  0
// dims     head 64, value 64; float16, accumulated in float32
// target   sm_80, family ampere
// plan     128 queries x 64 keys, 4 warps, 2 stage(s) of K and V, 2 CTA(s) per multiprocessor, 65536 bytes of shared memory
// FLOPs    384 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      392 * batch * heads_q * len_q + 256 * batch * heads_kv * len_k bytes, at least
//
// Grid: one CTA per (query tile, query head, batch). Reproduce with
//   flashgen show --pass backward --kernel dq --deterministic --target sm_80 '{"dropout":0.0,"dtype":"float16","head_dim":64,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.125,"score":{"expression":["Add","score",["Mul",["Load",{"capture":"slopes","dtype":"float32","grad":true,"ndim":1},"h"],["Sub","k","q"]]],"name":"alibi(Tensor('"'"'slopes'"'"', '"'"'float32'"'"', ndim=1, grad=True))"},"value_dim":64,"version":1}'

using Element = unsigned short;   // the bits of a float16

struct Strides {   // in elements
  long long batch, head, row;
};

struct BackwardDqArguments {
  const Element* q;
  const Element* k;
  const Element* v;
  const Element* d_o;
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  Element* dq;   // (batch, heads_q, len_q, head_dim)
  const float* slopes;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides d_o_strides;
  Strides dq_strides;
  long long slopes_stride[1];
  int heads_q;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
  unsigned kv_reciprocal;   // 2^31 / (query heads per KV head), rounded up
  int slopes_size[1];
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 64;
constexpr int kValueDim = 64;
constexpr int kHeadDimPadded = 64;   // a multiple of the depth of an mma; zeros beyond kHeadDim
constexpr int kValueDimPadded = 64;
constexpr int kTileQ = 128;          // queries per CTA
constexpr int kTileK = 64;           // keys per step
constexpr int kStages = 2;           // tiles of K, and of V, in shared memory
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kSplit = 1;            // warps with the same queries, each with a part of the keys and columns
constexpr int kRowsPerWarp = kTileQ / (kWarps / kSplit);
constexpr int kRowTiles = kRowsPerWarp / 16;   // a warp's 16-row mma tiles
constexpr int kKeysPerWarp = kTileK / kSplit;
constexpr int kKeyTiles = kKeysPerWarp / 8;    // a warp's 8-column mma tiles of scores
constexpr int kHeadTiles = kHeadDimPadded / 8 / kSplit;   // a warp's 8-column mma tiles of dQ
constexpr float kScale = 0.125f;
constexpr float kScoreToLog2 = 1.44269504f;   // log2(e): exp(x) is computed as exp2(x * log2(e))
constexpr float kNoLse = 3.40282347e+38f;     // marks a row whose scores are all masked
constexpr float kLargeLse = 4096.0f;     // to the base 2; the rounding of larger ones is visible in P
constexpr float kLseRounding = 2.38418579e-07f;   // 2^-22: relative error of LSEs and of scores in log2

// The masking that the scores of a tile need.
//   kNone: none, since all scores are allowed.
//   kMask: the mask.
//   kMaskAndBounds: the mask, the bounds, and the clamp of exponents that large LSEs need. It is chosen if the tile
//     extends beyond a bound or an LSE is large.
//     The only bound is the end of the keys.
enum class Masking { kNone, kMask, kMaskAndBounds };

constexpr int kElementBytes = sizeof(Element);

// Shared memory of a CTA, 65536 bytes, by offset:
//        0  Q, 16384 bytes
//    16384  dO, 16384 bytes
//    32768  K, 2 x 8192 bytes
//    49152  V, 2 x 8192 bytes
//        0  dQ, 16384 bytes, overlays Q
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kDoBytes = kTileQ * kValueDimPadded * kElementBytes;
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kDoOffset = kQueryBytes;
constexpr int kKeyOffset = kDoOffset + kDoBytes;
constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
static_assert(kValueOffset + kStages * kValueBytes <= 65536, "the shared memory of the launch");
static_assert(kRowTiles * 16 * kWarps == kTileQ * kSplit && kKeyTiles % 2 == 0, "whole mma tiles");

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Starts a copy of 16 bytes from global to shared memory. If not `valid`, it reads nothing and writes zeros.
__device__ __forceinline__ void copy_async_16(unsigned shared_destination, const void* global_source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_destination), "l"(global_source), "r"(valid ? 16 : 0) : "memory");
}

// Commits this thread's asynchronous copies since the last commit as a group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the latest kPending groups of this thread's asynchronous copies are complete.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
}

// Returns 2 to the power of x, from the special-function unit.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ldmatrix: loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(unsigned (&fragment)[4], unsigned shared_source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_source) : "memory");
}

// ldmatrix with transposition: loads four 8x8 matrices of 16-bit elements and transposes each. Lane l gives the address
// of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&fragment)[4], unsigned shared_source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_source) : "memory");
}

// mma: d (16x8, float32) += a (16x16) * b (16x8).
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to nearest even and puts them into one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Returns the 32-bit address of `pointer` in the shared-memory window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Returns a * b in 64 bits with one instruction. From widened operands the compiler may make four.
__device__ __forceinline__ long long wide_product(int a, int b) {
  long long product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

#endif

// A lane's fragment of an accumulator of kRowTiles x kColumnTiles tiles, each the 16 x 8 result of one mma. Of each
// tile it holds four elements, two adjacent columns in each of two rows that are 8 apart (PTX ISA, "Matrix Fragments
// for mma.m16n8k16 with floating point type"). Its first element is in row lane / 4 and column lane % 4 * 2 of the
// accumulator. Coordinates are relative to that element.
template <int kRowTiles, int kColumnTiles>
struct Fragment {
  static constexpr int kRows = kRowTiles * 2;     // rows that have elements
  static constexpr int kPairs = kColumnTiles;     // pairs of adjacent elements in each of these rows
  static constexpr int kElements = kRows * kPairs * 2;
  float tiles[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ float& operator[](int n) { return tiles[n / 4 / kColumnTiles][n / 4 % kColumnTiles][n % 4]; }
  __device__ __forceinline__ float operator[](int n) const { return tiles[n / 4 / kColumnTiles][n / 4 % kColumnTiles][n % 4]; }

  // Element n is in the fragment's row row_index(n), of 0 <= r < kRows. Its coordinates are row(n) and column(n).
  static __device__ constexpr int row_index(int n) { return n / 4 / kColumnTiles * 2 + n / 2 % 2; }
  static __device__ constexpr int row(int n) { return row_offset(row_index(n)); }
  static __device__ constexpr int column(int n) { return n / 4 % kColumnTiles * 8 + n % 2; }

  // row_offset is the coordinate of the fragment's row r, and pair is the index of the first of the two elements of
  // pair j of that row.
  static __device__ constexpr int row_offset(int r) { return r * 8; }
  static __device__ constexpr int pair(int r, int j) { return (r / 2 * kColumnTiles + j) * 4 + r % 2 * 2; }
};

using Scores = Fragment<kRowTiles, kKeyTiles>;
using Gradient = Fragment<kRowTiles, kHeadTiles>;   // of dQ

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `query` is a position
// in the sequence. `key` is relative to the key tile, since the mainloop iterates over key tiles.
struct Position {
  int batch, head, query, key;
};

// Returns slopes[i0]. Indices must not be negative and are clamped to the array. Strides are in bytes.
__device__ __forceinline__ float load_slopes(const BackwardDqArguments& arguments, int i0) {
  i0 = min(static_cast<unsigned>(i0), arguments.slopes_size[0] - 1u);
  const char* element = reinterpret_cast<const char*>(arguments.slopes);
  element += wide_product(i0, static_cast<int>(arguments.slopes_stride[0]));
  return static_cast<float>(__ldg(reinterpret_cast<const float*>(element)));
}

// Score function alibi(Tensor('slopes', 'float32', ndim=1, grad=True)).
__device__ __forceinline__ float score_mod(float score, int h, int q, int k, const BackwardDqArguments& arguments) {
  return score + load_slopes(arguments, h) * (k - q);
}

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const BackwardDqArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: the queries of one CTA, of one head of one batch.
struct WorkTile {
  int first_query, head, batch;
};

// Returns the KV head of a query head: head / heads_per_kv = umulhi(2 * head + 1, ceil(2^31 / heads_per_kv)), which is
// exact for head < 2^16 and heads_per_kv <= 2^13. The + 1 tolerates a reciprocal that is rounded in either direction.
// Unlike a division, this leaves the result and the addresses computed from it in uniform registers.
__device__ __forceinline__ int kv_head_of(int head, const BackwardDqArguments& arguments) {
  return __umulhi(2 * head + 1, arguments.kv_reciprocal);
}

// The key tiles to visit for a query tile. The mainloop takes a step for each. Those from full_begin to full_end need
// no mask. begin, full_begin and full_end are indices of tiles; count is a number of tiles.
struct KeyTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_key(int step) const { return (begin + step) * kTileK; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

// Returns the key tiles of a work tile.
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const BackwardDqArguments& arguments) {
  const int q_first = work.first_query;
  const int q_last = min(work.first_query + kTileQ, arguments.len_q) - 1;
  // The bounds are half-open ranges of keys.
  const int first_key = 0;
  const int end_key = min(arguments.len_k, q_last + arguments.len_k - arguments.len_q + 1);
  const int full_first_key = 0;
  const int full_end_key = min(arguments.len_k, q_first + arguments.len_k - arguments.len_q + 1);
  const int first_tile = first_key / kTileK;
  const int count = end_key > first_key ? (end_key + kTileK - 1) / kTileK - first_tile : 0;
  return {first_tile, count, (full_first_key + kTileK - 1) / kTileK, full_end_key / kTileK};
}

// ---- Loads and products ---------------------------------------------------------------------------------------------

// Returns the swizzle's period in 16-byte chunks. The chunks of each period of a row are permuted by the row's number,
// so that the 8 rows that ldmatrix reads at once are in different banks.
template <int kChunks>
__device__ constexpr int swizzle_span() { return kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2; }

// Returns the byte offset of a 16-byte chunk in a tile with kChunks chunks per row.
template <int kChunks>
__device__ constexpr unsigned tile_offset(int row, int chunk) {
  constexpr int kSpan = swizzle_span<kChunks>();
  return (row * kChunks + (chunk ^ (row / (8 / kSpan)) % kSpan)) * 16;
}

// Returns the address that this lane passes to ldmatrix for the 16 x 16 block at (row, chunk), multiples of 16 and 2.
// ldmatrix reads four 8 x 8 matrices: lane l addresses row l % 8 of matrix l / 8, at (lane_row, lane_chunk) of the
// block.
template <int kChunks>
__device__ __forceinline__ unsigned block_address(unsigned tile, int row, int chunk, int lane_row, int lane_chunk) {
  constexpr int kSpan = swizzle_span<kChunks>();
  const unsigned corner = tile_offset<kChunks>(lane_row, lane_chunk);
  return tile + row * kChunks * 16 + (corner ^ chunk % kSpan * 16) + chunk / kSpan * kSpan * 16;
}

// Returns the address for ldmatrix to read a block as operand A of an mma, or as a transposed operand B: its matrices
// in the order upper left, lower left, upper right, lower right.
template <int kChunks>
__device__ __forceinline__ unsigned block_by_columns(unsigned tile, int row, int chunk) {
  const int lane = threadIdx.x % 32;
  return block_address<kChunks>(tile, row, chunk, lane % 16, lane / 16);
}

// Returns the address for ldmatrix to read a block as operands B of two mmas: its matrices in the order upper left,
// upper right, lower left, lower right.
template <int kChunks>
__device__ __forceinline__ unsigned block_by_rows(unsigned tile, int row, int chunk) {
  const int lane = threadIdx.x % 32;
  return block_address<kChunks>(tile, row, chunk, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Starts loading rows first_row, ... of a matrix of row_count rows into a tile. Rows beyond the last are 0.
template <int kRows, int kColumns, int kColumnsPadded>
__device__ __forceinline__ void load_tile(unsigned tile, const Element* matrix, long long row_stride, int first_row,
                                          int row_count) {
  constexpr int kChunks = kColumnsPadded / 8;
  constexpr int kLanes = swizzle_span<kChunks>();   // adjacent lanes per row
  constexpr int kRowStep = kThreads / kLanes;
  const int first = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Element* source = matrix + (first_row + first) * row_stride + lane * 8;
#pragma unroll
  for (int row = first; row < first + kRows; row += kRowStep, source += kRowStep * row_stride) {
    if (kRows % kRowStep != 0 && row >= kRows) break;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kLanes) {
      const bool valid = first_row + row < row_count && (chunk + lane) * 8 < kColumns;
      copy_async_16(tile + tile_offset<kChunks>(row, chunk + lane), source + chunk * 8, valid);
    }
  }
}

// product += A * B^T. A is the warp's rows of a tile in shared memory, at `rows`; B is another tile, at `columns`.
template <int kDepth, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_by_transpose(Fragment<kRowTiles, kColumnTiles>& product, unsigned rows,
                                                      unsigned columns) {
  constexpr int kChunks = kDepth / 8;
#pragma unroll
  for (int depth = 0; depth < kDepth / 16; ++depth) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) load_matrix_x4(a[i], block_by_columns<kChunks>(rows, i * 16, depth * 2));
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      unsigned b[4];
      load_matrix_x4(b, block_by_rows<kChunks>(columns, j * 8, depth * 2));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_f16(product.tiles[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_f16(product.tiles[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// product += A * B. A is in registers and rounded to the input's type; B is a tile in shared memory with kChunks chunks
// per row, at `values`, from chunk first_chunk on.
template <int kChunks, int kRowTiles, int kDepthTiles, int kWidthTiles>
__device__ __forceinline__ void multiply_registers(Fragment<kRowTiles, kWidthTiles>& product,
                                                   const Fragment<kRowTiles, kDepthTiles>& factor, unsigned values,
                                                   int first_chunk = 0) {
#pragma unroll
  for (int depth = 0; depth < kDepthTiles / 2; ++depth) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float (&left)[4] = factor.tiles[i][depth * 2], (&right)[4] = factor.tiles[i][depth * 2 + 1];
      a[i][0] = pack_f16(left[0], left[1]);
      a[i][1] = pack_f16(left[2], left[3]);
      a[i][2] = pack_f16(right[0], right[1]);
      a[i][3] = pack_f16(right[2], right[3]);
    }
#pragma unroll
    for (int j = 0; j < kWidthTiles; j += 2) {
      unsigned b[4];
      load_matrix_x4_transposed(b, block_by_columns<kChunks>(values, depth * 16, first_chunk + j));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_f16(product.tiles[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_f16(product.tiles[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Stores a warp's accumulators times a factor, rounded, to (first_row, first_chunk) of a tile with kChunks chunks per
// row.
template <int kChunks, class Values>
__device__ __forceinline__ void store_rounded(const Values& values, float factor, unsigned char* tile, int first_row,
                                              int first_chunk) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Values::kRows; ++r) {
    const int row = first_row + Values::row_offset(r) + lane / 4;
#pragma unroll
    for (int j = 0; j < Values::kPairs; ++j) {
      const int n = Values::pair(r, j);
      *reinterpret_cast<unsigned*>(tile + tile_offset<kChunks>(row, first_chunk + j) + lane % 4 * 4) =
          pack_f16(values[n] * factor, values[n + 1] * factor);
    }
  }
}

// ---- Score gradients ------------------------------------------------------------------------------------------------

// Loads LSE (to the base 2) and D of the lane's rows.
__device__ __forceinline__ void load_lse_and_d(float2 (&rows)[Scores::kRows], const Position& position,
                                               const BackwardDqArguments& arguments) {
  const long long head = static_cast<long long>(position.batch) * arguments.heads_q + position.head;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const int query = min(position.query + Scores::row_offset(r), arguments.rows - 1);
    rows[r] = *reinterpret_cast<const float2*>(arguments.lse_and_d + (head * arguments.rows + query) * 2);
  }
}

// Returns whether some row of the warp has a large LSE.
__device__ __forceinline__ bool has_large_lse(const float2 (&rows)[Scores::kRows]) {
  bool large = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) large |= fabsf(rows[r].x) > kLargeLse && fabsf(rows[r].x) < kNoLse;
  return __any_sync(0xffffffffu, large);
}

// Recomputes P and dS in place. The products Q * K^T become P, and dP becomes dS = P * (dP - D) with D = rowsum(dO *
// O). P and dS of masked-out scores are 0. With kMaskAndBounds, an exponent above -|LSE| * kLseRounding counts as 0: P
// is then at most 1, and exactly 1 if it differs from 1 by no more than the rounding of the LSE.
template <Masking kMasking>
__device__ __forceinline__ void recompute_p_and_ds(Scores& probabilities,
                                                   Scores& ds,
                                                   const float2 (&rows)[Scores::kRows],
                                                   const Position& position, int first_key,
                                                   const BackwardDqArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const int q = position.query + Scores::row(n), k = first_key + position.key + Scores::column(n);
    const float product = probabilities[n];
    const float score = score_mod(product * kScale, position.head, q, k, arguments);
    const float lse = rows[Scores::row_index(n)].x;
    float exponent = fmaf(score, kScoreToLog2, -lse);
    if (kMasking == Masking::kMaskAndBounds && exponent > fabsf(lse) * -kLseRounding) exponent = 0.0f;
    const float probability = exp2_approx(exponent);
    float d_score = probability * (ds[n] - (rows[Scores::row_index(n)].y));
    const bool attended = kMasking == Masking::kNone ||
        (kMasking == Masking::kMask || k < arguments.len_k) & mask_mod(q, k, arguments);
    d_score = attended ? d_score : 0.0f;
    probabilities[n] = attended ? probability : 0.0f;
    ds[n] = d_score;
  }
}

// ---- Epilogue -------------------------------------------------------------------------------------------------------

// Stores kRows rows of a tile, from warp_row on, to a matrix of row_count rows of which first_row is the tile's first.
template <int kRows, int kColumns, int kColumnsPadded>
__device__ __forceinline__ void store_rows(Element* matrix, long long row_stride, int first_row, int row_count,
                                           const unsigned char* tile, int warp_row) {
  constexpr int kChunks = kColumnsPadded / 8;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = warp_row + i / kChunks, chunk = i % kChunks;
    if (first_row + row < row_count && chunk * 8 < kColumns) {
      *reinterpret_cast<uint4*>(matrix + (first_row + row) * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + tile_offset<kChunks>(row, chunk));
    }
  }
}

// Sets rows that attend to no key to 0, whatever K holds.
__device__ __forceinline__ void clear_empty_rows(Gradient& dq, const float2 (&rows)[Gradient::kRows]) {
#pragma unroll
  for (int r = 0; r < Gradient::kRows; ++r) {
    if (rows[r].x != kNoLse) continue;
#pragma unroll
    for (int j = 0; j < Gradient::kPairs; ++j) {
      dq[Gradient::pair(r, j)] = dq[Gradient::pair(r, j) + 1] = 0.0f;
    }
  }
}

// The epilogue: stores dQ through shared memory. The rows of a warp overwrite its own rows of Q, which no other warp
// reads.
__device__ __forceinline__ void epilogue(Gradient& dq, const float2 (&rows)[Gradient::kRows], const WorkTile& work,
                                         int warp_row, int part, const BackwardDqArguments& arguments) {
  clear_empty_rows(dq, rows);
  store_rounded<kHeadDimPadded / 8>(dq, kScale, shared_memory, warp_row, part * kHeadTiles);
  __syncwarp();
  Element* gradient = arguments.dq + work.batch * arguments.dq_strides.batch + work.head * arguments.dq_strides.head;
  constexpr int kRows = kRowsPerWarp / kSplit;
  store_rows<kRows, kHeadDim, kHeadDimPadded>(gradient, arguments.dq_strides.row, work.first_query, arguments.len_q,
                                              shared_memory, warp_row + part * kRows);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 2)
attention_backward_dq_fp16_d64_causal_alibi_tensor_slopes_float32_1_true_1dac6007(const __grid_constant__ BackwardDqArguments arguments) {
  // Later queries attend to more keys, so the last tiles start first.
  const WorkTile work = {static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTileQ, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  const int warp_row = threadIdx.x / 32 / kSplit * kRowsPerWarp, part = threadIdx.x / 32 % kSplit;
  const int lane = threadIdx.x % 32;
  const Position position = {work.batch, work.head, work.first_query + warp_row + lane / 4,
                             part * kKeysPerWarp + lane % 4 * 2};
  const Element* q = arguments.q + work.batch * arguments.q_strides.batch + work.head * arguments.q_strides.head;
  const Element* d_o = arguments.d_o + work.batch * arguments.d_o_strides.batch + work.head * arguments.d_o_strides.head;
  const int head_kv = kv_head_of(work.head, arguments);
  const Element* k = arguments.k + work.batch * arguments.k_strides.batch + head_kv * arguments.k_strides.head;
  const Element* v = arguments.v + work.batch * arguments.v_strides.batch + head_kv * arguments.v_strides.head;

  const unsigned q_tile = shared_address(shared_memory);
  const unsigned q_rows = q_tile + warp_row * kHeadDimPadded * kElementBytes;
  const unsigned d_o_rows = q_tile + kDoOffset + warp_row * kValueDimPadded * kElementBytes;

  Gradient dq = {};
  float2 rows[Scores::kRows];
  load_lse_and_d(rows, position, arguments);
  const bool large_lse = has_large_lse(rows);
  const KeyTiles tiles = key_tiles_of(work, arguments);
  const auto load_keys = [&](int step) {
    const unsigned tile = q_tile + kKeyOffset + step % kStages * kKeyBytes;
    load_tile<kTileK, kHeadDim, kHeadDimPadded>(tile, k, arguments.k_strides.row, tiles.first_key(step), arguments.len_k);
  };
  const auto load_values = [&](int step) {
    const unsigned tile = q_tile + kValueOffset + step % kStages * kValueBytes;
    load_tile<kTileK, kValueDim, kValueDimPadded>(tile, v, arguments.v_strides.row, tiles.first_key(step), arguments.len_k);
  };

  if (tiles.count > 0) {
    load_tile<kTileQ, kHeadDim, kHeadDimPadded>(q_tile, q, arguments.q_strides.row, work.first_query, arguments.len_q);
    load_tile<kTileQ, kValueDim, kValueDimPadded>(q_tile + kDoOffset, d_o, arguments.d_o_strides.row,
                                                  work.first_query, arguments.len_q);
    load_values(0);
    load_keys(0);
  }
  copy_async_commit();
  for (int step = 0; step < tiles.count; ++step) {
    const int first_key = tiles.first_key(step);
    const unsigned keys = q_tile + kKeyOffset + step % kStages * kKeyBytes;
    const unsigned values = q_tile + kValueOffset + step % kStages * kValueBytes;
    const unsigned key_rows = keys + part * kKeysPerWarp * kHeadDimPadded * kElementBytes;
    const unsigned value_rows = values + part * kKeysPerWarp * kValueDimPadded * kElementBytes;
    Scores probabilities = {}, ds = {};
    // K and V of this step have arrived, and every warp has finished the previous step.
    copy_async_wait<0>();
    __syncthreads();
    if (step + 1 < tiles.count) {
      load_keys(step + 1);
      load_values(step + 1);
    }
    copy_async_commit();
    multiply_by_transpose<kHeadDimPadded>(probabilities, q_rows, key_rows);
    multiply_by_transpose<kValueDimPadded>(ds, d_o_rows, value_rows);
    if (first_key + kTileK > arguments.len_k || large_lse) {
      recompute_p_and_ds<Masking::kMaskAndBounds>(probabilities, ds, rows, position, first_key, arguments);
    } else if (!tiles.full(step)) {
      recompute_p_and_ds<Masking::kMask>(probabilities, ds, rows, position, first_key, arguments);
    } else {
      recompute_p_and_ds<Masking::kNone>(probabilities, ds, rows, position, first_key, arguments);
    }
    multiply_registers<kHeadDimPadded / 8>(dq, ds, keys);
  }
  epilogue(dq, rows, work, warp_row, part, arguments);
}
