// flashgen: attention forward, fp16-d64-causal-dropout0.1-e7d6d3f4
//
// mask     causal()
// score    none; scale 0.125
// dropout  0.1
// dims     head 64, value 64; float16, accumulated in float32; heads_q a multiple of heads_kv
// target   sm_80, family ampere
// plan     128 queries x 64 keys, 4 warps, 2 stage(s) of K and V, 2 CTA(s) per multiprocessor, 49152 bytes of shared memory
// method   online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): row_max is the paper's running maximum m, which may lag; sum is its row sum l
// FLOPs    256 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      260 * batch * heads_q * len_q + 256 * batch * heads_kv * len_k bytes, at least
//
// Grid: one CTA per (query tile, query head, batch), along x, y and z. Reproduce with
//   flashgen show --target sm_80 '{"dropout":0.1,"dtype":"float16","head_dim":64,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.125,"score":null,"value_dim":64,"version":1}'

using Element = unsigned short;   // the bits of a float16

struct Strides {   // in elements
  long long batch, head, row;
};

struct ForwardArguments {
  const Element* q;
  const Element* k;
  const Element* v;
  Element* o;
  float* lse;   // (batch, heads_q, len_q), or null
  const uint2* seed;   // null if seed_low and seed_high are the seed
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int heads_q;
  int len_q;
  int len_k;
  unsigned kv_reciprocal;   // 2^31 / (query heads per KV head), rounded up
  unsigned seed_low;
  unsigned seed_high;
  unsigned offset;
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
constexpr int kRowsPerWarp = kTileQ / kWarps;
constexpr int kRowTiles = kRowsPerWarp / 16;   // a warp's 16-row mma tiles
constexpr int kKeyTiles = kTileK / 8;          // 8-column mma tiles of scores
constexpr int kValueTiles = kValueDimPadded / 8;
constexpr float kScoreToLog2 = 0.180336878f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
// Row maxima with |row_max| below this are folded into the FMA of the exponent: see RowState::offset.
constexpr float kMaxFoldedRowMax = 93032640.0f;
constexpr unsigned kKeepThreshold = 230;   // a probability is kept where its random byte is below
constexpr float kRescaleThreshold = 8.0f;      // in log2: by how much a row maximum may lag

constexpr int kElementBytes = sizeof(Element);

// Shared memory of a CTA, 49152 bytes, by offset:
//        0  Q, 16384 bytes
//    16384  K, 2 x 8192 bytes
//    32768  V, 2 x 8192 bytes
//        0  O, 16384 bytes, overlays Q
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kKeyOffset = kQueryBytes;
constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
static_assert(kValueOffset + kStages * kValueBytes <= 49152, "the shared memory of the launch");
static_assert(kRowTiles * 16 * kWarps == kTileQ && kTileK % 16 == 0, "whole mma tiles");

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

// Returns the logarithm of x to base 2, from the special-function unit.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

#endif

// Returns which of 16 random bytes are at least a threshold: bit 16 + e of the result is that of byte e. Bit n of byte
// e is bit n / 4 * 16 + e of word n % 4. The lower 16 bits of the result are undefined.
template <unsigned kThreshold>
__device__ __forceinline__ unsigned bytes_at_least(uint4 random) {
  const unsigned words[4] = {random.x, random.y, random.z, random.w};
  unsigned greater = 0;   // whether bits below n make a byte greater than kThreshold - 1
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n == 4) greater <<= 16;
    greater = (kThreshold - 1) >> n & 1 ? words[n % 4] & greater : words[n % 4] | greater;
  }
  return greater;
}

// Returns -inf.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Computes rounds [kFirst, kLast) of Philox4x32 (Salmon et al. 2011). All seven rounds turn a 64-bit key and a 128-bit
// counter into 16 random bytes.
template <int kFirst, int kLast>
__device__ __forceinline__ uint4 philox(uint2 key, uint4 counter) {
#pragma unroll
  for (int round = kFirst; round < kLast; ++round) {
    const unsigned long long product0 = 0xD2511F53ull * counter.x, product1 = 0xCD9E8D57ull * counter.z;
    const unsigned key0 = key.x + round * 0x9E3779B9u, key1 = key.y + round * 0xBB67AE85u;
    counter = make_uint4((product1 >> 32) ^ counter.y ^ key0, product1, (product0 >> 32) ^ counter.w ^ key1, product0);
  }
  return counter;
}

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

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `query` is a position
// in the sequence. `key` is relative to the key tile, since the mainloop iterates over key tiles.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const ForwardArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: the queries of one CTA, of one head of one batch.
struct WorkTile {
  int first_query, head, batch;
};

// Returns the KV head of a query head: head / heads_per_kv = umulhi(2 * head + 1, ceil(2^31 / heads_per_kv)), which is
// exact for head < 2^16 and heads_per_kv <= 2^13. The + 1 tolerates a reciprocal that is rounded in either direction.
// Unlike a division, this leaves the result and the addresses computed from it in uniform registers.
__device__ __forceinline__ int kv_head_of(int head, const ForwardArguments& arguments) {
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
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const ForwardArguments& arguments) {
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

// ---- Score, mask and softmax ----------------------------------------------------------------------------------------

// Applies the mask: sets the scores of masked-out keys to -inf.
__device__ __forceinline__ void apply_mask(Scores& scores, const Position& position, int first_key,
                                           const ForwardArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const int q = position.query + Scores::row(n), k = first_key + position.key + Scores::column(n);
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

// Turns a tile of Q * K^T into scores: applies the mask, and masks keys beyond the last one.
__device__ __forceinline__ void apply_mods(Scores& scores, const Position& position,
                                           const KeyTiles& tiles, int step, int first_key, const ForwardArguments& arguments) {
  if (!tiles.full(step)) apply_mask(scores, position, first_key, arguments);
  if (first_key + kTileK > arguments.len_k) apply_seqlen_mask(scores, position, arguments.len_k - first_key);
}

// The running state of a row: the row maximum m, which may lag, and this lane's part of the row sum l of the
// probabilities exp(scale * (s - m)), which are computed as 2^((s - m) * kScoreToLog2). s and m are scores before the
// scale.
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

// Returns the seed of the random numbers.
__device__ __forceinline__ uint2 seed_of(const ForwardArguments& arguments) {
  return arguments.seed ? __ldg(arguments.seed) : make_uint2(arguments.seed_low, arguments.seed_high);
}

// Returns which scores of a lane's fragment are dropped in the block of 16 queries x 32 keys that a query and a key are
// in: bit n for element n of the block. One call of philox serves the 16 elements.
__device__ __forceinline__ unsigned dropped_in_block(uint2 seed, int batch, int head, int query, int key, unsigned lane,
                                                     const ForwardArguments& arguments) {
  const uint4 counter = make_uint4(batch << 16 | head, key / 32, arguments.offset,
                                   query / 16 * 32 + lane);
  return bytes_at_least<kKeepThreshold>(philox<0, 7>(seed, counter)) >> 16;
}

// Sets the dropped probabilities to 0.
__device__ __forceinline__ void apply_dropout(Scores& probabilities, const Position& position, int first_key,
                                              const ForwardArguments& arguments) {
  const uint2 seed = seed_of(arguments);
#pragma unroll
  for (int n = 0; n < Scores::kElements; n += 16) {   // the first elements of blocks
    const int query = position.query + Scores::row(n), key = first_key + Scores::column(n);
    const unsigned dropped = dropped_in_block(seed, position.batch, position.head, query, key, threadIdx.x % 32, arguments);
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      if (dropped >> e & 1) probabilities[n + e] = 0.0f;
    }
  }
}

// ---- Epilogue and mainloop ------------------------------------------------------------------------------------------

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

// Divides this warp's rows of the output by the row sums, rounds them and stores them to shared memory. A row that
// attends to no key is 0, whatever V holds.
__device__ __forceinline__ void store_output_to_shared(const Output& output, RowState (&rows)[Output::kRows],
                                                       int warp_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Output::kRows; ++r) {
    rows[r].sum = quad_sum(rows[r].sum);
    const float normalise = 1.11304343f / rows[r].sum;   // 256 / kKeepThreshold
#pragma unroll
    for (int j = 0; j < Output::kPairs; ++j) {
      const int row = warp_row + Output::row_offset(r) + lane / 4, n = Output::pair(r, j);
      const unsigned pair = pack_f16(output[n] * normalise, output[n + 1] * normalise);
      *reinterpret_cast<unsigned*>(shared_memory + tile_offset<kValueDimPadded / 8>(row, j) + lane % 4 * 4) =
          rows[r].sum == 0.0f ? 0 : pair;
    }
  }
}

// Stores the log-sum-exp of this lane's rows, to the base e. For rows that attend to no key it is -inf.
__device__ __forceinline__ void store_lse(const RowState (&rows)[Output::kRows], const Position& position,
                                          const ForwardArguments& arguments) {
  const long long head = static_cast<long long>(position.batch) * arguments.heads_q + position.head;
  if (arguments.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < Output::kRows; ++r) {
    const int query = position.query + Output::row_offset(r);
    const float log2_sum = rows[r].row_max * kScoreToLog2 + log2_approx(rows[r].sum);
    if (query >= arguments.len_q) continue;
    arguments.lse[head * arguments.len_q + query] = rows[r].sum == 0.0f ? minus_infinity() : log2_sum * 0.69314718f;
  }
}

// The epilogue: stores this warp's rows of the output, through shared memory, and their log-sum-exps.
__device__ __forceinline__ void epilogue(const Output& output, RowState (&rows)[Output::kRows], const WorkTile& work,
                                         const Position& position, int warp_row, const ForwardArguments& arguments) {
  // The rows of a warp overwrite its own rows of Q, which no other warp reads.
  store_output_to_shared(output, rows, warp_row);
  store_lse(rows, position, arguments);
  Element* o = arguments.o + work.batch * arguments.o_strides.batch + work.head * arguments.o_strides.head;
  __syncwarp();   // a warp reads back only its own rows
  store_rows<kRowsPerWarp, kValueDim, kValueDimPadded>(o, arguments.o_strides.row, work.first_query, arguments.len_q,
                                                       shared_memory, warp_row);
}

// Computes the output of a work tile: the mainloop over the tiles of K and V, and the epilogue. All warps share the
// tiles of K and V, and each computes its own rows of the output.
__device__ __forceinline__ void compute_work_tile(const WorkTile& work, const ForwardArguments& arguments) {
  const int warp_row = threadIdx.x / 32 * kRowsPerWarp, lane = threadIdx.x % 32;
  const Position position = {work.batch, work.head, work.first_query + warp_row + lane / 4, lane % 4 * 2};
  const Element* q = arguments.q + work.batch * arguments.q_strides.batch + work.head * arguments.q_strides.head;
  const int head_kv = kv_head_of(work.head, arguments);
  const Element* k = arguments.k + work.batch * arguments.k_strides.batch + head_kv * arguments.k_strides.head;
  const Element* v = arguments.v + work.batch * arguments.v_strides.batch + head_kv * arguments.v_strides.head;
  const unsigned q_tile = shared_address(shared_memory), k_tile = q_tile + kKeyOffset, v_tile = q_tile + kValueOffset;
  const unsigned q_rows = q_tile + warp_row * kHeadDimPadded * kElementBytes;
  Output output = {};
  RowState rows[Scores::kRows];
  bool steady = false;   // whether the row maxima of the warp can be used as offsets
  const KeyTiles tiles = key_tiles_of(work, arguments);
  const auto load_keys = [&](int step) {
    const unsigned tile = k_tile + step % kStages * kKeyBytes;
    load_tile<kTileK, kHeadDim, kHeadDimPadded>(tile, k, arguments.k_strides.row, tiles.first_key(step), arguments.len_k);
  };
  const auto load_values = [&](int step) {
    const unsigned tile = v_tile + step % kStages * kValueBytes;
    load_tile<kTileK, kValueDim, kValueDimPadded>(tile, v, arguments.v_strides.row, tiles.first_key(step), arguments.len_k);
  };

  if (tiles.count > 0) {
    load_tile<kTileQ, kHeadDim, kHeadDimPadded>(q_tile, q, arguments.q_strides.row, work.first_query, arguments.len_q);
    load_keys(0);
    load_values(0);
  }
  copy_async_commit();
  for (int step = 0; step < tiles.count; ++step) {
    const int first_key = tiles.first_key(step);
    // K and V of this step have arrived, and every warp has read the other stage, which the next step's loads fill.
    copy_async_wait<0>();
    __syncthreads();
    if (step + 1 < tiles.count) {
      load_keys(step + 1);
      load_values(step + 1);
    }
    copy_async_commit();

    Scores scores = {};
    multiply_by_transpose<kHeadDimPadded>(scores, q_rows, k_tile + step % kStages * kKeyBytes);
    apply_mods(scores, position, tiles, step, first_key, arguments);
    online_softmax(scores, output, rows, steady);
    apply_dropout(scores, position, first_key, arguments);
    multiply_registers<kValueDimPadded / 8>(output, scores, v_tile + step % kStages * kValueBytes);
  }
  epilogue(output, rows, work, position, warp_row, arguments);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 2)
attention_forward_fp16_d64_causal_dropout0_1_e7d6d3f4(const __grid_constant__ ForwardArguments arguments) {
  // Later queries attend to more keys, so the last tiles start first.
  const WorkTile work = {static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTileQ, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  compute_work_tile(work, arguments);
}
