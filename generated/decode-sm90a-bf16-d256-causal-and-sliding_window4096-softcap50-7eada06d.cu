// flashgen: attention decode, bf16-d256-causal-and-sliding_window4096-softcap50-7eada06d
//
// mask     causal() & sliding_window(4096)
// score    softcap(50); scale 0.0625
// dropout  0
// dims     head 256, value 256; bfloat16, accumulated in float32; heads_q a multiple of heads_kv
// target   sm_90a, family hopper
// plan     16 rows x 16 keys, 4 warps that share the keys, 3 stages of K and V each, 1 CTA(s) per multiprocessor, 204800 bytes of shared memory
// method   online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): row_max is the paper's running maximum m, which may lag; sum is its row sum l
//          split-KV over warps and CTAs; the last CTA to arrive combines partial outputs (Dao et al. 2023, Flash-Decoding)
// FLOPs    1024 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      1028 * batch * heads_q * len_q + 1024 * batch * heads_kv * len_k * (share of tiles visited) bytes, at least; + 2064 * splits * batch * heads_q * len_q for partial outputs if splits > 1; K and V are read once for each 16 rows
//
// Grid: one CTA per (output tile and split, group of heads, batch), along x, y and z. Reproduce with
//   flashgen show --pass decode --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":256,"layout":"bhsd","mask":{"expression":["And",["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],["And",["LessEqual",["Sub",["Add","q",["Sub","len_k","len_q"]],4096],"k"],["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]]]],"name":"causal() & sliding_window(4096)"},"scale":0.0625,"score":{"expression":["Mul",{"float":"0x1.9000000000000p+5"},["FastTanh",["Divide","score",{"float":"0x1.9000000000000p+5"}]]],"name":"softcap(50)"},"value_dim":256,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct DecodeArguments {
  const Element* q;
  const Element* k;
  const Element* v;
  Element* o;
  float* lse;   // (batch, heads_q, len_q), or null
  float* partial_outputs;   // (output tiles, splits, kTileQ, kValueDim)
  float* partial_states;   // (output tiles, splits, kTileQ, 2): row maximum and row sum
  unsigned* arrivals;   // (output tiles): 0 before and after a launch; null for 1 split
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int heads_q;
  int len_q;
  int len_k;
  int packed;   // query heads that share a tile of rows
  int rows;   // of a group of such heads: queries x heads
  int row_tiles;   // tiles of these rows
  int splits;   // splits of the keys of an output tile
  unsigned kv_reciprocal;   // 2^31 / (query heads per KV head), rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 256;
constexpr int kValueDim = 256;
constexpr int kHeadDimPadded = 256;   // a multiple of the depth of an mma; zeros beyond kHeadDim
constexpr int kValueDimPadded = 256;
constexpr int kTileQ = 16;          // rows per CTA: queries of all query heads of a KV head
constexpr int kTileK = 16;          // keys per step of a warp
constexpr int kStages = 3;          // pipeline stages of each warp
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kRowTiles = kTileQ / 16;   // 16-row mma tiles; each warp has all of them
constexpr int kKeyTiles = kTileK / 8;    // 8-column mma tiles of scores
constexpr int kValueTiles = kValueDimPadded / 8;
constexpr float kScale = 0.0625f;
constexpr float kScoreToLog2 = 1.44269504f;   // log2(e): exp(x) is computed as exp2(x * log2(e))
// Row maxima with |row_max| below this are folded into the FMA of the exponent: see RowState::offset.
constexpr float kMaxFoldedRowMax = 11629080.0f;
constexpr float kRescaleThreshold = 8.0f;      // in log2: by how much a row maximum may lag

constexpr int kElementBytes = sizeof(Element);
constexpr int kPartialColumns = kValueDimPadded + 8;   // floats per row; the padding avoids bank conflicts

// Shared memory of a CTA, 204800 bytes, by offset:
//        0  Q, 8192 bytes
//     8192  stages of warps (K, V), 12 x 16384 bytes; those of a warp side by side
//        0  partial O of warps, 4 x 16896 bytes, overlays Q
//    67584  maxima and sums of warps, 4 x 128 bytes
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kStageBytes = kKeyBytes + kValueBytes;
constexpr int kPartialBytes = kTileQ * kPartialColumns * sizeof(float);
constexpr int kStatesBytes = kTileQ * sizeof(float2);
constexpr int kStageOffset = kQueryBytes;
constexpr int kStatesOffset = kWarps * kPartialBytes;
static_assert(kStageOffset + kWarps * kStages * kStageBytes <= 204800, "the shared memory of the launch");
static_assert(kStatesOffset + kWarps * kStatesBytes <= 204800, "the shared memory of the launch");
static_assert(kTileQ % 16 == 0 && kTileK % 16 == 0, "whole mma tiles");

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Increments a counter that wraps to 0 after `last`, and returns its previous value. With acquire and release
// semantics: this thread sees the writes that precede earlier increments, and later increments see those of this thread
// and of the threads with which it has synchronised.
__device__ __forceinline__ unsigned atomic_inc_acq_rel(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

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

// Returns the logarithm of x to base 2, from the special-function unit.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Returns the hyperbolic tangent of x from the special-function unit (sm_75 and later; absolute error below 2^-10).
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif

// Returns -inf.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Returns the maximum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Returns the sum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

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
using Output = Fragment<kRowTiles, kValueTiles>;

// ---- The variant ----------------------------------------------------------------------------------------------------

// The indices of this lane's scores: batch, first key relative to the tile, and the query and query head of each row.
struct Position {
  int batch, key;
  int query[Scores::kRows], head[Scores::kRows];

  __device__ __forceinline__ int query_at(int r) const { return query[r]; }
  __device__ __forceinline__ int head_at(int r) const { return head[r]; }
};

// Score function softcap(50). The softmax scale is folded into its constants.
__device__ __forceinline__ float score_mod(float product, const DecodeArguments& arguments) {
  return 50.0f * tanh_approx(product * (kScale / 50.0f));
}

// Mask causal() & sliding_window(4096): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const DecodeArguments& arguments) {
  const int x0 = q + (arguments.len_k - arguments.len_q);
  const bool x1 = k <= x0;
  return x1 & (x0 - 4096 <= k) & x1;
}

// A work tile: a tile of rows and a split of its keys. A row is a query of one of the `packed` query heads from `head`
// on. Rows are numbered by query, and within a query by head.
struct WorkTile {
  int first_query, last_query, head, batch;
  int offset;   // of the tile's first row within its query
  int rows;     // that exist
  int split;    // index of the split
  long long slot;   // output tile, over all heads and batches: selects the arrival counter and partial outputs
};

// Returns the KV head of a query head: head / heads_per_kv = umulhi(2 * head + 1, ceil(2^31 / heads_per_kv)), which is
// exact for head < 2^16 and heads_per_kv <= 2^13. The + 1 tolerates a reciprocal that is rounded in either direction.
// Unlike a division, this leaves the result and the addresses computed from it in uniform registers.
__device__ __forceinline__ int kv_head_of(int head, const DecodeArguments& arguments) {
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
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const DecodeArguments& arguments) {
  const int q_first = work.first_query;
  const int q_last = work.last_query;
  const int x0 = q_first + arguments.len_k - arguments.len_q;
  const int x1 = q_last + arguments.len_k - arguments.len_q;
  // The bounds are half-open ranges of keys.
  const int first_key = max(0, x0 - 4096);
  const int end_key = min(arguments.len_k, x1 + 1);
  const int full_first_key = max(0, x1 - 4096);
  const int full_end_key = min(arguments.len_k, x0 + 1);
  const int first_tile = first_key / kTileK;
  const int count = end_key > first_key ? (end_key + kTileK - 1) / kTileK - first_tile : 0;
  return {first_tile, count, (full_first_key + kTileK - 1) / kTileK, full_end_key / kTileK};
}

// ---- The scheduler --------------------------------------------------------------------------------------------------

__device__ __forceinline__ WorkTile work_tile_of_block(const DecodeArguments& arguments) {
  const int tile = blockIdx.x % arguments.row_tiles, first_row = tile * kTileQ;
  const int rows = min(kTileQ, arguments.rows - first_row);
  const int head = blockIdx.y * arguments.packed;
  const long long slot = (static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y) * arguments.row_tiles + tile;
  return {first_row / arguments.packed, (first_row + rows - 1) / arguments.packed, head, static_cast<int>(blockIdx.z),
          first_row % arguments.packed, rows, static_cast<int>(blockIdx.x) / arguments.row_tiles, slot};
}

// Returns the first tile of keys of a split, where the split before it ends. Splits differ by at most one tile.
__device__ __forceinline__ int first_tile_of_split(int split, int tiles, int splits) {
  return split * (tiles / splits) + min(split, tiles % splits);
}

// The query and the query head of a row.
struct Row {
  int query, head;
};

__device__ __forceinline__ Row row_at(int row, const WorkTile& work, const DecodeArguments& arguments) {
  const int index = work.offset + row;
  return {work.first_query + index / arguments.packed, work.head + index % arguments.packed};
}

// Returns the indices of this lane's scores. Rows beyond the last have the indices of the last.
__device__ __forceinline__ Position position_of(const WorkTile& work, const DecodeArguments& arguments) {
  const int lane = threadIdx.x % 32;
  Position position = {work.batch, lane % 4 * 2};
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const Row row = row_at(min(Scores::row_offset(r) + lane / 4, work.rows - 1), work, arguments);
    position.query[r] = row.query;
    position.head[r] = row.head;
  }
  return position;
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
  constexpr int kRowStep = 32 / kLanes;
  const int first = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
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

// Starts loading the tile's rows of Q. Rows that do not exist are 0.
__device__ __forceinline__ void load_queries(unsigned tile, const WorkTile& work, const DecodeArguments& arguments) {
  constexpr int kChunks = kHeadDimPadded / 8;
  const Element* q = arguments.q + work.batch * arguments.q_strides.batch;
  for (int i = threadIdx.x; i < kTileQ * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const Row indices = row_at(row, work, arguments);
    const Element* source = q + indices.head * arguments.q_strides.head + indices.query * arguments.q_strides.row;
    copy_async_16(tile + tile_offset<kChunks>(row, chunk), source + chunk * 8, row < work.rows && chunk * 8 < kHeadDim);
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

// ---- Score, mask and softmax ----------------------------------------------------------------------------------------

// Applies the score function to a tile of products.
__device__ __forceinline__ void apply_score(Scores& scores, const Position& position, int first_key,
                                            const DecodeArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    scores[n] = score_mod(scores[n], arguments);
  }
}

// Applies the mask: sets the scores of masked-out keys to -inf.
__device__ __forceinline__ void apply_mask(Scores& scores, const Position& position, int first_key,
                                           const DecodeArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const int q = position.query_at(Scores::row_index(n)), k = first_key + position.key + Scores::column(n);
    scores[n] = mask_mod(q, k, arguments) ? scores[n] : minus_infinity();
  }
}

// Sets the scores of keys beyond the last one to -inf: the tile has `keys_left` keys. Only the last tile of a sequence
// may have such keys, so they are not a part of the mask.
__device__ __forceinline__ void apply_seqlen_mask(Scores& scores, const Position& position, int keys_left) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    if (Scores::column(n) >= keys_left - position.key) scores[n] = minus_infinity();
  }
}

// Turns a tile of Q * K^T into scores: applies score_mod and the mask, and masks keys beyond the last one.
__device__ __forceinline__ void apply_mods(Scores& scores, const Position& position,
                                           const KeyTiles& tiles, int step, int first_key, const DecodeArguments& arguments) {
  apply_score(scores, position, first_key, arguments);
  if (!tiles.full(step)) apply_mask(scores, position, first_key, arguments);
  if (first_key + kTileK > arguments.len_k) apply_seqlen_mask(scores, position, arguments.len_k - first_key);
}

// The running state of a row: the row maximum m, which may lag, and this lane's part of the row sum l of the
// probabilities exp(s - m), which are computed as 2^((s - m) * kScoreToLog2).
struct RowState {
  float row_max = minus_infinity(), sum = 0.0f;

  // The offset that folds the row maximum into the fused multiply-add of an exponent. It is usable if the row has seen
  // a key, so that its maximum is finite, and if |row_max * kScoreToLog2| < 2^24. Then rounding of this product changes
  // the exponent by at most 1/2, and P by at most a factor sqrt(2), which is the same for all P with this row_max. A
  // score of this size is itself rounded by as much.
  __device__ __forceinline__ float offset() const { return -row_max * kScoreToLog2; }
  __device__ __forceinline__ bool offset_is_usable() const { return fabsf(row_max) < kMaxFoldedRowMax; }

  // Raises the row maximum, rescales the sum and returns the factor that rescales the output. A row without a key has
  // nothing to rescale, and -inf - -inf would be NaN.
  __device__ __forceinline__ float update_row_max(float maximum) {
    const float old = row_max;
    row_max = fmaxf(old, maximum);
    const float rescale_factor = row_max == minus_infinity() ? 1.0f : exp2_approx((old - row_max) * kScoreToLog2);
    sum *= rescale_factor;
    return rescale_factor;
  }
};

// Subtracts the row maximum from each score. This is for row maxima that cannot be used as offsets: it avoids the
// rounding error of row_max * kScoreToLog2, at the cost of one more operation per score.
__device__ __forceinline__ void subtract_row_max(Scores& scores, const RowState (&rows)[Scores::kRows]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const float row_max = rows[Scores::row_index(n)].row_max;
    scores[n] -= row_max == minus_infinity() ? 0.0f : row_max;
  }
}

// Turns a tile of scores into probabilities 2^(s - m) and adds them to the row sums. The row maxima are raised, and
// output and sums rescaled, only if the scores of some row of the warp exceed its maximum by kRescaleThreshold.
// `steady` is whether all row maxima of the warp can be used as offsets; while they cannot, every tile rescales.
__device__ __forceinline__ void online_softmax(Scores& scores, Output& output, RowState (&rows)[Scores::kRows], bool& steady) {
  float maximum[Scores::kRows];
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    maximum[r] = fmaxf(scores[Scores::pair(r, 0)], scores[Scores::pair(r, 0) + 1]);
#pragma unroll
    for (int j = 1; j < Scores::kPairs; ++j) {
      const int n = Scores::pair(r, j);
      maximum[r] = fmaxf(maximum[r], fmaxf(scores[n], scores[n + 1]));
    }
    maximum[r] = quad_max(maximum[r]);
    outgrown |= (maximum[r] - rows[r].row_max) * kScoreToLog2 > kRescaleThreshold;
  }
  if (!steady || __any_sync(0xffffffffu, outgrown)) {
    bool all = true;
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) {
      const float rescale_factor = rows[r].update_row_max(maximum[r]);
      all = all && rows[r].offset_is_usable();
#pragma unroll
      for (int j = 0; j < Output::kPairs; ++j) {
        output[Output::pair(r, j)] *= rescale_factor;
        output[Output::pair(r, j) + 1] *= rescale_factor;
      }
    }
    steady = __all_sync(0xffffffffu, all);
    if (!steady) subtract_row_max(scores, rows);
  }
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const float offset = steady ? rows[r].offset() : 0.0f;
#pragma unroll
    for (int j = 0; j < Scores::kPairs; ++j) {
      const int n = Scores::pair(r, j);
      scores[n] = exp2_approx(fmaf(scores[n], kScoreToLog2, offset));
      scores[n + 1] = exp2_approx(fmaf(scores[n + 1], kScoreToLog2, offset));
      rows[r].sum += scores[n] + scores[n + 1];
    }
  }
}

// ---- Partial outputs, mainloop and epilogue -------------------------------------------------------------------------

// The partial outputs of the warps in shared memory, not divided by their row sums, and (row maximum, row sum) of each
// row.
__device__ __forceinline__ float* warp_outputs() { return reinterpret_cast<float*>(shared_memory); }
__device__ __forceinline__ float2* warp_states() { return reinterpret_cast<float2*>(shared_memory + kStatesOffset); }

// Stores the partial output of this warp to shared memory. A row without a key is 0, whatever V holds.
__device__ __forceinline__ void store_warp_partial(const Output& output, RowState (&rows)[Output::kRows]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Output::kRows; ++r) {
    const int row = warp * kTileQ + Output::row_offset(r) + lane / 4;
    rows[r].sum = quad_sum(rows[r].sum);
    const bool empty = rows[r].sum == 0.0f;
    if (lane % 4 == 0) warp_states()[row] = make_float2(rows[r].row_max, rows[r].sum);
    float* partial = warp_outputs() + row * kPartialColumns + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Output::kPairs; ++j) {
      const int n = Output::pair(r, j);
      *reinterpret_cast<float2*>(partial + j * 8) = empty ? make_float2(0.0f, 0.0f) : make_float2(output[n], output[n + 1]);
    }
  }
}

// Loads from shared memory, or from global memory, to which other SMs have written.
template <bool kFromWarps, class Value>
__device__ __forceinline__ Value load_partial(const Value* partial) { return kFromWarps ? *partial : __ldcg(partial); }

constexpr int kPartialsAtOnce = 16;   // loads in flight; each takes as long as a round trip to the L2

// Combines `count` partial outputs of four columns of a row. The order is fixed, so the result does not depend on the
// order in which CTAs arrive.
template <bool kFromWarps>
__device__ __forceinline__ RowState combine_partials(float4& output, const float* outputs, const float2* states, int count) {
  constexpr int kStep = kTileQ * (kFromWarps ? kPartialColumns : kValueDim);
  constexpr int kAtOnce = kFromWarps ? kWarps : kPartialsAtOnce;
  RowState combined;
#pragma unroll 8
  for (int index = kAtOnce; index < count; ++index) {   // the maxima of the first kAtOnce follow below
    combined.row_max = fmaxf(combined.row_max, load_partial<kFromWarps>(states + index * kTileQ).x);
  }
  output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < count; first += kAtOnce, states += kAtOnce * kTileQ, outputs += kAtOnce * kStep) {
    float2 state[kAtOnce];
    float4 partial[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4* columns = reinterpret_cast<const float4*>(outputs + i * kStep);
      const bool exists = first + i < count;
      state[i] = exists ? load_partial<kFromWarps>(states + i * kTileQ) : make_float2(minus_infinity(), 0.0f);
      partial[i] = exists ? load_partial<kFromWarps>(columns) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) combined.row_max = fmaxf(combined.row_max, state[i].x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = state[i].x == minus_infinity() ? 0.0f : exp2_approx((state[i].x - combined.row_max) * kScoreToLog2);
      output.x = fmaf(partial[i].x, weight, output.x);
      output.y = fmaf(partial[i].y, weight, output.y);
      output.z = fmaf(partial[i].z, weight, output.z);
      output.w = fmaf(partial[i].w, weight, output.w);
      combined.sum = fmaf(state[i].y, weight, combined.sum);
    }
  }
  return combined;
}

// The partial outputs of a tile's splits in global memory, from a split on, and the states of their rows.
__device__ __forceinline__ float* split_outputs(const WorkTile& work, int split, const DecodeArguments& arguments) {
  return arguments.partial_outputs + (work.slot * arguments.splits + split) * (kTileQ * kValueDim);
}
__device__ __forceinline__ float2* split_states(const WorkTile& work, int split, const DecodeArguments& arguments) {
  return reinterpret_cast<float2*>(arguments.partial_states) + (work.slot * arguments.splits + split) * kTileQ;
}

// Combines the partial outputs of the CTA's warps and stores the result to global memory.
__device__ __forceinline__ void store_split_partial(const WorkTile& work, const DecodeArguments& arguments) {
  float* outputs = split_outputs(work, work.split, arguments);
  float2* states = split_states(work, work.split, arguments);
  for (int i = threadIdx.x * 4; i < work.rows * kValueDim; i += kThreads * 4) {
    const int row = i / kValueDim, column = i % kValueDim;
    float4 output;
    const RowState state =
        combine_partials<true>(output, warp_outputs() + row * kPartialColumns + column, warp_states() + row, kWarps);
    *reinterpret_cast<float4*>(outputs + i) = output;
    if (column == 0) states[row] = make_float2(state.row_max, state.sum);
  }
}

// Whether this CTA is the last to arrive of those with a split of the tile. It then sees the partial outputs of all
// splits: one thread's acquire-release is enough, as barriers order the CTA's writes before it and its reads after it
// (PTX ISA, causality order).
__device__ __forceinline__ bool arrives_last(unsigned* arrivals, int splits) {
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomic_inc_acq_rel(arrivals, splits - 1) + 1 == splits;
  return __syncthreads_or(last);
}

// Computes a step of a warp: Q * K^T, the softmax of the scores, and P * V.
__device__ __forceinline__ void compute_step(Output& output, RowState (&rows)[Scores::kRows], bool& steady,
                                             const Position& position, const KeyTiles& tiles, int step,
                                             int first_key, unsigned q_tile, unsigned stage, const DecodeArguments& arguments) {
  Scores scores = {};
  multiply_by_transpose<kHeadDimPadded>(scores, q_tile, stage);
  apply_mods(scores, position, tiles, step, first_key, arguments);
  online_softmax(scores, output, rows, steady);
  multiply_registers<kValueDimPadded / 8>(output, scores, stage + kKeyBytes);
}

// Computes the partial outputs of the CTA's warps and stores them to shared memory. Each warp runs its own mainloop,
// over every kWarps-th tile of the split's keys.
__device__ __forceinline__ void compute_warp_partials(const WorkTile& work, const DecodeArguments& arguments) {
  const Position position = position_of(work, arguments);
  const int head_kv = kv_head_of(work.head, arguments);
  const Element* k = arguments.k + work.batch * arguments.k_strides.batch + head_kv * arguments.k_strides.head;
  const Element* v = arguments.v + work.batch * arguments.v_strides.batch + head_kv * arguments.v_strides.head;

  const unsigned q_tile = shared_address(shared_memory);
  const unsigned stages = q_tile + kQueryBytes + threadIdx.x / 32 * kStages * kStageBytes;   // of this warp
  const KeyTiles tiles = key_tiles_of(work, arguments);
  const int end = first_tile_of_split(work.split + 1, tiles.count, arguments.splits);
  const int begin = first_tile_of_split(work.split, tiles.count, arguments.splits) + threadIdx.x / 32;   // of this warp
  const auto load_stage = [&](int iteration) {   // loads K and V of an iteration of this warp
    const int step = begin + iteration * kWarps;
    const unsigned stage = stages + iteration % kStages * kStageBytes;
    if (step < end) {
      load_tile<kTileK, kHeadDim, kHeadDimPadded>(stage, k, arguments.k_strides.row, tiles.first_key(step), arguments.len_k);
      load_tile<kTileK, kValueDim, kValueDimPadded>(stage + kKeyBytes, v, arguments.v_strides.row, tiles.first_key(step), arguments.len_k);
    }
  };

  for (int iteration = 0; iteration < kStages - 1; ++iteration) {
    load_stage(iteration);
    if (iteration == 0) load_queries(q_tile, work, arguments);
    copy_async_commit();
  }
  Output output = {};
  RowState rows[Scores::kRows];
  bool steady = false;   // whether the row maxima of the warp can be used as offsets
  copy_async_wait<kStages - 2>();
  __syncthreads();   // Q has arrived, which all threads have loaded
  for (int iteration = 0, step = begin; step < end; ++iteration, step += kWarps) {
    const int first_key = tiles.first_key(step);
    const unsigned stage = stages + iteration % kStages * kStageBytes;
    // The tile of this step has arrived, and every lane has read that of the previous step, whose stage is loaded
    // again.
    copy_async_wait<kStages - 2>();
    __syncwarp();
    load_stage(iteration + kStages - 1);
    copy_async_commit();
    compute_step(output, rows, steady, position, tiles, step, first_key, q_tile, stage, arguments);
  }
  __syncthreads();   // every warp has read the tiles, which the partial outputs overwrite
  store_warp_partial(output, rows);
  __syncthreads();
}

// Combines the partial outputs of the tile, of the CTA's warps or of all splits, and stores the output and the LSE.
template <bool kFromWarps>
__device__ __forceinline__ void store_output(const WorkTile& work, const DecodeArguments& arguments) {
  constexpr int kColumns = kFromWarps ? kPartialColumns : kValueDim;
  const int count = kFromWarps ? kWarps : arguments.splits;
  const float* outputs = kFromWarps ? warp_outputs() : split_outputs(work, 0, arguments);
  const float2* states = kFromWarps ? warp_states() : split_states(work, 0, arguments);
  for (int i = threadIdx.x * 4; i < work.rows * kValueDim; i += kThreads * 4) {
    const int row = i / kValueDim, column = i % kValueDim;
    float4 output;
    const RowState state =
        combine_partials<kFromWarps>(output, outputs + row * kColumns + column, states + row, count);
    const Row indices = row_at(row, work, arguments);
    const float normalise = 1.0f / state.sum;
    const bool empty = state.sum == 0.0f;
    const uint2 rounded = make_uint2(pack_bf16(output.x * normalise, output.y * normalise),
                                     pack_bf16(output.z * normalise, output.w * normalise));
    Element* o = arguments.o + work.batch * arguments.o_strides.batch + indices.head * arguments.o_strides.head +
                 indices.query * arguments.o_strides.row;
    *reinterpret_cast<uint2*>(o + column) = empty ? make_uint2(0, 0) : rounded;
    if (column != 0 || arguments.lse == nullptr) continue;
    const long long head = static_cast<long long>(work.batch) * arguments.heads_q + indices.head;
    const float log2_sum = state.row_max * kScoreToLog2 + log2_approx(state.sum);
    arguments.lse[head * arguments.len_q + indices.query] = state.sum == 0.0f ? minus_infinity() : log2_sum * 0.69314718f;
  }
}

// The epilogue: stores the output of a tile with one split. Otherwise stores the CTA's partial output, and the last CTA
// to arrive combines those of all splits.
__device__ __forceinline__ void epilogue(const WorkTile& work, const DecodeArguments& arguments) {
  if (arguments.splits == 1) return store_output<true>(work, arguments);
  store_split_partial(work, arguments);
  if (arrives_last(arguments.arrivals + work.slot, arguments.splits)) store_output<false>(work, arguments);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_decode_bf16_d256_causal_and_sliding_window4096_softcap50_7eada06d(const __grid_constant__ DecodeArguments arguments) {
  const WorkTile work = work_tile_of_block(arguments);
  compute_warp_partials(work, arguments);
  epilogue(work, arguments);
}
