// flashgen: attention backward, dkdv, bf16-d128-causal-56b1805a
// Computes dK and dV, and accumulates dQ; a CTA iterates over the queries of a key tile.
//
// mask     causal()
// score    none; scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32
// target   sm_80, family ampere
// plan     64 queries x 128 keys, 8 warps, 2 of which share rows, 2 stage(s) of Q and dO, 1 CTA(s) per multiprocessor, 164864 bytes of shared memory
// FLOPs    1280 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      1544 * batch * heads_q * len_q + 1024 * batch * heads_kv * len_k bytes, at least
//
// Grid: one CTA per (key tile, KV head, batch). Reproduce with
//   flashgen show --pass backward --kernel dkdv --target sm_80 '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":null,"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct BackwardDkdvArguments {
  const Element* q;
  const Element* k;
  const Element* v;
  const Element* d_o;
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  float* dq_accum;   // (batch, heads_q, rows, padded head_dim), in fragment order
  Element* dk;   // (batch, heads_kv, len_k, head_dim)
  Element* dv;   // (batch, heads_kv, len_k, value_dim)
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides d_o_strides;
  Strides dk_strides;
  Strides dv_strides;
  int heads_q;
  int heads_per_kv;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kValueDim = 128;
constexpr int kHeadDimPadded = 128;   // a multiple of the depth of an mma; zeros beyond kHeadDim
constexpr int kValueDimPadded = 128;
constexpr int kTileK = 128;          // keys per CTA
constexpr int kTileQ = 64;           // queries per step
constexpr int kStages = 2;           // tiles of Q, and of dO, in shared memory
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kSplit = 2;            // warps with the same keys, each with a part of the queries and columns
constexpr int kRowsPerWarp = kTileK / (kWarps / kSplit);   // rows are keys: scores are held transposed
constexpr int kRowTiles = kRowsPerWarp / 16;   // a warp's 16-row mma tiles
constexpr int kQueriesPerWarp = kTileQ / kSplit;
constexpr int kQueryTiles = kQueriesPerWarp / 8;   // a warp's 8-column mma tiles of scores
constexpr int kHeadTiles = kHeadDimPadded / 8 / kSplit;     // a warp's 8-column mma tiles of dK
constexpr int kValueTiles = kValueDimPadded / 8 / kSplit;   // a warp's 8-column mma tiles of dV
constexpr float kScale = 0.0883883461f;
constexpr float kScoreToLog2 = 0.127517432f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
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

// The warps that divide a tile of dQ along its rows and columns, and the mma tiles of each of them.
constexpr int kGradientRowWarps = 2;
constexpr int kGradientColumnWarps = 4;
constexpr int kGradientRowTiles = kTileQ / 16 / kGradientRowWarps;
constexpr int kGradientColumnTiles = kHeadDimPadded / 8 / kGradientColumnWarps;

constexpr int kElementBytes = sizeof(Element);

// Shared memory of a CTA, 164864 bytes, by offset:
//        0  K, 32768 bytes
//    32768  V, 32768 bytes
//    65536  Q, 2 x 16384 bytes
//    98304  dO, 2 x 16384 bytes
//   131072  L, D, 2 x 512 bytes
//   132096  dS, 16384 bytes
//   148480  P, 16384 bytes
//        0  dK, 32768 bytes, overlays K
//    32768  dV, 32768 bytes, overlays V
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kDoBytes = kTileQ * kValueDimPadded * kElementBytes;
constexpr int kLseAndDBytes = kTileQ * sizeof(float2);
constexpr int kScoreBytes = kTileK * kTileQ * kElementBytes;
constexpr int kProbabilityBytes = kTileK * kTileQ * kElementBytes;
constexpr int kValueOffset = kKeyBytes;
constexpr int kQueryOffset = kValueOffset + kValueBytes;
constexpr int kDoOffset = kQueryOffset + kStages * kQueryBytes;
constexpr int kLseAndDOffset = kDoOffset + kStages * kDoBytes;
constexpr int kScoreOffset = kLseAndDOffset + kStages * kLseAndDBytes;
constexpr int kProbabilityOffset = kScoreOffset + kScoreBytes;
static_assert(kProbabilityOffset + kProbabilityBytes <= 164864, "the shared memory of the launch");
static_assert(kRowTiles * 16 * kWarps == kTileK * kSplit && kQueryTiles % 2 == 0, "whole mma tiles");

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
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to nearest even and puts them into one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Returns the 32-bit address of `pointer` in the shared-memory window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
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

using Scores = Fragment<kRowTiles, kQueryTiles>;

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `key` is a position in
// the sequence. `query` is relative to the query tile, since the mainloop iterates over query tiles.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const BackwardDkdvArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: the keys of one CTA, of one KV head of one batch, for all query heads of that KV head.
struct WorkTile {
  int first_key, head_kv, batch;
};

// The query tiles to visit for a key tile. The mainloop takes an iteration for each. Those from full_begin to full_end
// need no mask. begin, full_begin and full_end are indices of tiles; count is a number of tiles.
struct QueryTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_query(int step) const { return (begin + step) * kTileQ; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

// Returns the query tiles of a work tile and a query head.
__device__ __forceinline__ QueryTiles query_tiles_of(const WorkTile& work, int head, const BackwardDkdvArguments& arguments) {
  const int k_first = work.first_key;
  const int k_last = min(work.first_key + kTileK, arguments.len_k) - 1;
  // The bounds are half-open ranges of queries.
  const int first_query = max(0, k_first + arguments.len_q - arguments.len_k);
  const int end_query = arguments.len_q;
  const int full_first_query = max(0, k_last + arguments.len_q - arguments.len_k);
  const int full_end_query = arguments.len_q;
  const int first_tile = first_query / kTileQ;
  const int count = end_query > first_query ? (end_query + kTileQ - 1) / kTileQ - first_tile : 0;
  return {first_tile, count, (full_first_query + kTileQ - 1) / kTileQ, full_end_query / kTileQ};
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

// Starts loading the tiles of K and V.
__device__ __forceinline__ void load_keys_and_values(const WorkTile& work, unsigned k_tile, unsigned v_tile,
                                                     const BackwardDkdvArguments& arguments) {
  const Element* k = arguments.k + work.batch * arguments.k_strides.batch + work.head_kv * arguments.k_strides.head;
  const Element* v = arguments.v + work.batch * arguments.v_strides.batch + work.head_kv * arguments.v_strides.head;
  load_tile<kTileK, kHeadDim, kHeadDimPadded>(k_tile, k, arguments.k_strides.row, work.first_key, arguments.len_k);
  load_tile<kTileK, kValueDim, kValueDimPadded>(v_tile, v, arguments.v_strides.row, work.first_key, arguments.len_k);
}

// Starts loading LSE and D of a tile of queries, (LSE to the base 2, D) for each row. The array is padded to whole
// tiles.
__device__ __forceinline__ void load_lse_and_d(unsigned tile, const float* source) {
  for (int i = threadIdx.x; i < kLseAndDBytes / 16; i += kThreads) {
    copy_async_16(tile + i * 16, source + i * 4, true);
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
        mma_m16n8k16_bf16(product.tiles[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_bf16(product.tiles[i][j + 1], a[i], b[2], b[3]);
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
      a[i][0] = pack_bf16(left[0], left[1]);
      a[i][1] = pack_bf16(left[2], left[3]);
      a[i][2] = pack_bf16(right[0], right[1]);
      a[i][3] = pack_bf16(right[2], right[3]);
    }
#pragma unroll
    for (int j = 0; j < kWidthTiles; j += 2) {
      unsigned b[4];
      load_matrix_x4_transposed(b, block_by_columns<kChunks>(values, depth * 16, first_chunk + j));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(product.tiles[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_bf16(product.tiles[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// product += A * B over the kDepth elements of depth from `first` on. Both are tiles in shared memory: A is the warp's
// rows, at `rows`, with kFactorChunks chunks per row; B has kChunks chunks per row, from chunk first_chunk on.
template <int kDepth, int kFactorChunks, int kChunks, int kRowTiles, int kWidthTiles>
__device__ __forceinline__ void multiply_shared(Fragment<kRowTiles, kWidthTiles>& product, unsigned rows,
                                                unsigned values, int first, int first_chunk) {
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      load_matrix_x4(a[i], block_by_columns<kFactorChunks>(rows, i * 16, (first + depth) / 8));
    }
#pragma unroll
    for (int j = 0; j < kWidthTiles; j += 2) {
      unsigned b[4];
      load_matrix_x4_transposed(b, block_by_columns<kChunks>(values, first + depth, first_chunk + j));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(product.tiles[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_bf16(product.tiles[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// product += A * B over the depth that the other warps with the same rows have computed: A is their parts of P or dS,
// at `rows` in shared memory; B is a tile with kColumns columns.
template <int kColumns, int kRowTiles, int kWidthTiles>
__device__ __forceinline__ void multiply_other_parts(Fragment<kRowTiles, kWidthTiles>& product, unsigned rows,
                                                     unsigned tile, int part) {
#pragma unroll
  for (int other = 1; other < kSplit; ++other) {
    const int first = (part + other) % kSplit * kQueriesPerWarp;
    multiply_shared<kQueriesPerWarp, kTileQ / 8, kColumns / 8>(product, rows, tile, first, part * kWidthTiles);
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
          pack_bf16(values[n] * factor, values[n + 1] * factor);
    }
  }
}

// ---- Score gradients ------------------------------------------------------------------------------------------------

// Returns LSE and D of the two adjacent queries of this lane's pair j: (LSE, D) of the first, then of the second. A
// column of the transposed scores is a query, so that pair j has the same queries in all rows of the lane. lse_and_d:
// the tile's (kTileQ, 2) floats in shared memory.
__device__ __forceinline__ float4 lse_and_d_of(const unsigned char* lse_and_d, int j) {
  const int query = threadIdx.x / 32 % kSplit * kQueriesPerWarp + Scores::column(Scores::pair(0, j)) + threadIdx.x % 4 * 2;
  return *reinterpret_cast<const float4*>(lse_and_d + query * 8);
}

// Returns whether some query of a tile has a large LSE.
__device__ __forceinline__ bool has_large_lse(const unsigned char* lse_and_d) {
  float largest = 0.0f;
  for (int row = threadIdx.x % 32; row < kTileQ; row += 32) {
    const float lse = fabsf(*reinterpret_cast<const float*>(lse_and_d + row * 8));
    if (lse < kNoLse) largest = fmaxf(largest, lse);
  }
  return __any_sync(0xffffffffu, largest > kLargeLse);
}

// Recomputes P and dS in place. The products Q * K^T become P, and dP becomes dS = P * (dP - D) with D = rowsum(dO *
// O). P and dS of masked-out scores are 0. With kMaskAndBounds, an exponent above -|LSE| * kLseRounding counts as 0: P
// is then at most 1, and exactly 1 if it differs from 1 by no more than the rounding of the LSE.
template <Masking kMasking>
__device__ __forceinline__ void recompute_p_and_ds(Scores& probabilities,
                                                   Scores& ds,
                                                   const unsigned char* lse_and_d,
                                                   const Position& position, int first_query,
                                                   const BackwardDkdvArguments& arguments) {
#pragma unroll
  for (int j = 0; j < Scores::kPairs; ++j) {
    const float4 statistics = lse_and_d_of(lse_and_d, j);
#pragma unroll
    for (int m = 0; m < Scores::kRows * 2; ++m) {
      const int n = Scores::pair(m / 2, j) + m % 2;
      const int q = first_query + position.query + Scores::column(n), k = position.key + Scores::row(n);
      const float lse = m % 2 ? statistics.z : statistics.x;
      float exponent = fmaf(probabilities[n], kScoreToLog2, -lse);
      if (kMasking == Masking::kMaskAndBounds && exponent > fabsf(lse) * -kLseRounding) exponent = 0.0f;
      const float probability = exp2_approx(exponent);
      float d_score = probability * (ds[n] - (m % 2 ? statistics.w : statistics.y));
      const bool attended = kMasking == Masking::kNone ||
          (kMasking == Masking::kMask || k < arguments.len_k) & mask_mod(q, k, arguments);
      d_score = attended ? d_score : 0.0f;
      probabilities[n] = attended ? probability : 0.0f;
      ds[n] = d_score;
    }
  }
}

// Turns products into P, and dP into dS. full: no element of the tile is masked out.
__device__ __forceinline__ void compute_score_gradients(
    Scores& probabilities, Scores& ds, const unsigned char* lse_and_d, bool full, const WorkTile& work,
    const Position& position, int first_query, const BackwardDkdvArguments& arguments) {
  if (work.first_key + kTileK > arguments.len_k || has_large_lse(lse_and_d)) {
    recompute_p_and_ds<Masking::kMaskAndBounds>(probabilities, ds, lse_and_d, position, first_query, arguments);
  } else if (!full) {
    recompute_p_and_ds<Masking::kMask>(probabilities, ds, lse_and_d, position, first_query, arguments);
  } else {
    recompute_p_and_ds<Masking::kNone>(probabilities, ds, lse_and_d, position, first_query, arguments);
  }
}

// ---- The dQ accumulator ---------------------------------------------------------------------------------------------

// Returns the offset of an element of a lane within the 128 elements of an mma tile. The accumulator stores mma tiles
// one after the other, so that a warp adds to consecutive addresses.
__device__ constexpr int accum_offset(int lane, int element) { return element * 32 + lane; }

// Adds dS * K to a tile of the dQ accumulator, in which a warp has a part of the rows and columns. `ds` holds dS
// transposed: its rows are keys.
__device__ __forceinline__ void accumulate_dq(float* sums, unsigned ds, unsigned keys) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / kGradientColumnWarps * kGradientRowTiles * 16;
  const int first_column = warp % kGradientColumnWarps * kGradientColumnTiles * 8;
  if (kWarps != kGradientRowWarps * kGradientColumnWarps && warp >= kGradientRowWarps * kGradientColumnWarps) return;
  float dq[kGradientRowTiles][kGradientColumnTiles][4] = {};
#pragma unroll
  for (int depth = 0; depth < kTileK / 16; ++depth) {
    unsigned a[kGradientRowTiles][4];
#pragma unroll
    for (int i = 0; i < kGradientRowTiles; ++i) {
      load_matrix_x4_transposed(a[i], block_by_rows<kTileQ / 8>(ds, depth * 16, first_row / 8 + i * 2));
    }
#pragma unroll
    for (int j = 0; j < kGradientColumnTiles; j += 2) {
      unsigned b[4];
      load_matrix_x4_transposed(b, block_by_columns<kHeadDimPadded / 8>(keys, depth * 16, first_column / 8 + j));
#pragma unroll
      for (int i = 0; i < kGradientRowTiles; ++i) {
        mma_m16n8k16_bf16(dq[i][j], a[i], b[0], b[1]);
        mma_m16n8k16_bf16(dq[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
  sums += warp * kGradientRowTiles * kGradientColumnTiles * 128;
#pragma unroll
  for (int i = 0; i < kGradientRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kGradientColumnTiles; ++j) {
      float* tile = sums + (i * kGradientColumnTiles + j) * 128;
#pragma unroll
      for (int e = 0; e < 4; ++e) atomicAdd(tile + accum_offset(lane, e), dq[i][j][e]);
    }
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

// The epilogue of dK or dV: rounds it, stores it to shared memory at `tile` and from there to global memory.
template <int kColumns, int kColumnsPadded, int kTiles>
__device__ __forceinline__ void store_gradients(const Fragment<kRowTiles, kTiles>& gradients, float factor,
                                                unsigned char* tile, Element* matrix, const Strides& strides,
                                                const WorkTile& work, int warp_row, int part, int row_count) {
  store_rounded<kColumnsPadded / 8>(gradients, factor, tile, warp_row, part * kTiles);
  matrix += work.batch * strides.batch + work.head_kv * strides.head;
  __syncthreads();   // the warps with the same keys have stored all columns
  constexpr int kRows = kRowsPerWarp / kSplit;
  store_rows<kRows, kColumns, kColumnsPadded>(matrix, strides.row, work.first_key, row_count, tile,
                                              warp_row + part * kRows);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_dkdv_bf16_d128_causal_56b1805a(const __grid_constant__ BackwardDkdvArguments arguments) {
  const WorkTile work = {static_cast<int>(blockIdx.x) * kTileK, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  const int warp_row = threadIdx.x / 32 / kSplit * kRowsPerWarp, part = threadIdx.x / 32 % kSplit;
  const int lane = threadIdx.x % 32;
  const unsigned k_tile = shared_address(shared_memory);
  const unsigned v_tile = k_tile + kValueOffset;
  const unsigned k_rows = k_tile + warp_row * kHeadDimPadded * kElementBytes;
  const unsigned v_rows = v_tile + warp_row * kValueDimPadded * kElementBytes;
  const unsigned ds_tile = k_tile + kScoreOffset;
  const unsigned ds_rows = ds_tile + warp_row * kTileQ * kElementBytes;
  const unsigned probability_rows = k_tile + kProbabilityOffset + warp_row * kTileQ * kElementBytes;

  Fragment<kRowTiles, kHeadTiles> dk = {};
  Fragment<kRowTiles, kValueTiles> dv = {};
  load_keys_and_values(work, k_tile, v_tile, arguments);

  for (int member = 0; member < arguments.heads_per_kv; ++member) {
    const int head = work.head_kv * arguments.heads_per_kv + member;
    const Position position = {work.batch, head, part * kQueriesPerWarp + lane % 4 * 2,
                               work.first_key + warp_row + lane / 4};
    const QueryTiles tiles = query_tiles_of(work, head, arguments);
    const Element* q = arguments.q + work.batch * arguments.q_strides.batch + head * arguments.q_strides.head;
    const Element* d_o = arguments.d_o + work.batch * arguments.d_o_strides.batch + head * arguments.d_o_strides.head;
    const long long first_row = (static_cast<long long>(work.batch) * arguments.heads_q + head) * arguments.rows;
    const auto load_queries = [&](int step) {   // and their lse_and_d
      const int first_query = tiles.first_query(step);
      load_tile<kTileQ, kHeadDim, kHeadDimPadded>(k_tile + kQueryOffset + step % kStages * kQueryBytes, q,
                                                  arguments.q_strides.row, first_query, arguments.len_q);
      load_lse_and_d(k_tile + kLseAndDOffset + step % kStages * kLseAndDBytes,
                     arguments.lse_and_d + (first_row + first_query) * 2);
    };
    const auto load_output_gradients = [&](int step) {
      const int first_query = tiles.first_query(step);
      load_tile<kTileQ, kValueDim, kValueDimPadded>(k_tile + kDoOffset + step % kStages * kDoBytes, d_o,
                                                    arguments.d_o_strides.row, first_query, arguments.len_q);
    };

    if (tiles.count > 0) load_output_gradients(0);
    if (tiles.count > 0) load_queries(0);
    copy_async_commit();
    for (int step = 0; step < tiles.count; ++step) {
      const int first_query = tiles.first_query(step);
      const unsigned q_tile = k_tile + kQueryOffset + step % kStages * kQueryBytes;
      const unsigned d_o_tile = k_tile + kDoOffset + step % kStages * kDoBytes;
      const unsigned q_rows = q_tile + part * kQueriesPerWarp * kHeadDimPadded * kElementBytes;
      const unsigned d_o_rows = d_o_tile + part * kQueriesPerWarp * kValueDimPadded * kElementBytes;
      const unsigned char* lse_and_d = shared_memory + kLseAndDOffset + step % kStages * kLseAndDBytes;
      Scores probabilities = {}, ds = {};
      // Q and dO of this step have arrived, and every warp has finished the previous step.
      copy_async_wait<0>();
      __syncthreads();
      if (step + 1 < tiles.count) {
        load_queries(step + 1);
        load_output_gradients(step + 1);
      }
      copy_async_commit();
      multiply_by_transpose<kHeadDimPadded>(probabilities, k_rows, q_rows);
      multiply_by_transpose<kValueDimPadded>(ds, v_rows, d_o_rows);
      compute_score_gradients(probabilities, ds, lse_and_d, tiles.full(step), work, position, first_query, arguments);
      store_rounded<kTileQ / 8>(probabilities, 1.0f, shared_memory + kProbabilityOffset, warp_row, part * kQueryTiles);
      store_rounded<kTileQ / 8>(ds, 1.0f, shared_memory + kScoreOffset, warp_row, part * kQueryTiles);
      // The products with this warp's own part of P and dS do not wait for the other parts.
      multiply_registers<kValueDimPadded / 8>(dv, probabilities, d_o_rows, part * kValueTiles);
      multiply_registers<kHeadDimPadded / 8>(dk, ds, q_rows, part * kHeadTiles);
      __syncthreads();   // all of P and dS is in shared memory
      multiply_other_parts<kValueDimPadded>(dv, probability_rows, d_o_tile, part);
      multiply_other_parts<kHeadDimPadded>(dk, ds_rows, q_tile, part);

      accumulate_dq(arguments.dq_accum + (first_row + first_query) * kHeadDimPadded, ds_tile, k_tile);
    }
    __syncthreads();   // every warp has read Q and dO, which those of the next head overwrite
  }

  // dK and dV overwrite K and V.
  copy_async_wait<0>();
  __syncthreads();
  store_gradients<kHeadDim, kHeadDimPadded>(dk, kScale, shared_memory, arguments.dk, arguments.dk_strides, work,
                                            warp_row, part, arguments.len_k);
  store_gradients<kValueDim, kValueDimPadded>(dv, 1.0f, shared_memory + kValueOffset, arguments.dv,
                                              arguments.dv_strides, work, warp_row, part, arguments.len_k);
}
