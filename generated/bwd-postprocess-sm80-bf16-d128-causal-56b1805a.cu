// flashgen: attention backward, postprocess, bf16-d128-causal-56b1805a
// Converts the dQ accumulator to dQ.
//
// mask     causal()
// score    none; scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32
// target   sm_80, family ampere
// plan     64 queries x 128 keys, 8 warps, 2 of which share rows, 2 stage(s) of Q and dO, 1 CTA(s) per multiprocessor, 0 bytes of shared memory
// FLOPs    128 * batch * heads_q * len_q
// HBM      768 * batch * heads_q * len_q bytes, at least
//
// Grid: one CTA per (query tile, query head, batch). Reproduce with
//   flashgen show --pass backward --kernel postprocess --target sm_80 '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":null,"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct BackwardPostprocessArguments {
  const float* dq_accum;
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  Element* dq;   // (batch, heads_q, len_q, head_dim)
  Strides dq_strides;
  int len_q;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kDim = 128;
constexpr int kHeadDimPadded = 128;
constexpr int kTile = 64;       // queries of a tile of the kernel that accumulates
constexpr int kThreads = 256;
constexpr float kScale = 0.0883883461f;
constexpr float kNoLse = 3.40282347e+38f;   // marks a row whose scores are all masked
// The warps that divide a tile of dQ along its rows and columns, and the mma tiles of each of them.
constexpr int kGradientRowWarps = 2;
constexpr int kGradientColumnWarps = 4;
constexpr int kGradientRowTiles = kTile / 16 / kGradientRowWarps;
constexpr int kGradientColumnTiles = kHeadDimPadded / 8 / kGradientColumnWarps;

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Rounds two floats to nearest even and puts them into one register, `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Returns the offset of an element of a lane within the 128 elements of an mma tile. The accumulator stores mma tiles
// one after the other, so that a warp adds to consecutive addresses.
__device__ constexpr int accum_offset(int lane, int element) { return element * 32 + lane; }

// Returns the offset of an element within a tile of the accumulator, by the warp, the mma tile and the lane that added
// it.
__device__ __forceinline__ int accum_index(int row, int column) {
  const int warp = row / (kGradientRowTiles * 16) * kGradientColumnWarps + column / (kGradientColumnTiles * 8);
  const int i = row / 16 % kGradientRowTiles, j = column / 8 % kGradientColumnTiles;
  const int lane = row % 8 * 4 + column % 8 / 2, element = row / 8 % 2 * 2 + column % 2;
  return ((warp * kGradientRowTiles + i) * kGradientColumnTiles + j) * 128 + accum_offset(lane, element);
}

// Converts a query tile of the accumulator to dQ, with the softmax scale as a factor. Rows whose scores are all masked
// are 0, whatever K holds.
extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_postprocess_bf16_d128_causal_56b1805a(const __grid_constant__ BackwardPostprocessArguments arguments) {
  constexpr int kChunks = kDim / 8;
  const int first = blockIdx.x * kTile, head = blockIdx.y, batch = blockIdx.z;
  const long long row = (static_cast<long long>(batch) * gridDim.y + head) * arguments.rows + first;
  const float* sums = arguments.dq_accum + row * kHeadDimPadded;
  Element* gradient = arguments.dq + batch * arguments.dq_strides.batch + head * arguments.dq_strides.head;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads) {
    // 16 threads convert 16 rows of 8 columns: one mma tile, whose elements are contiguous in the accumulator.
    const int row_in_tile = i / (16 * kChunks) * 16 + i % 16, column = i / 16 % kChunks * 8;
    if (first + row_in_tile >= arguments.len_q) continue;
    unsigned pairs[4] = {};
    const bool empty = arguments.lse_and_d[(row + row_in_tile) * 2] == kNoLse;
#pragma unroll
    for (int j = 0; j < 4 && !empty; ++j) {
      const float low = sums[accum_index(row_in_tile, column + 2 * j)], high = sums[accum_index(row_in_tile, column + 2 * j + 1)];
      pairs[j] = pack_bf16(low * kScale, high * kScale);
    }
    *reinterpret_cast<uint4*>(gradient + (first + row_in_tile) * arguments.dq_strides.row + column) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
