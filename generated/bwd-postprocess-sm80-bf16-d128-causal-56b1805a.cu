// flashgen: attention backward, postprocess, bf16-d128-causal-56b1805a
// dQ, converted from its accumulator
//
// mask     causal()
// score    none; scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32
// target   sm_80, family ampere
// plan     64 queries x 128 keys, 8 warps, 2 of which share rows, 2 stage(s) of Q and dO, 1 block(s) per multiprocessor, 0 bytes of shared memory
// FLOPs    128 * batch * heads_q * len_q
// HBM      768 * batch * heads_q * len_q bytes, at least
//
// Grid: one block per (tile of queries, head, batch). Made by
//   flashgen show --pass backward --kernel postprocess --target sm_80 '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":null,"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct BackwardPostprocessArguments {
  const float* dq_accum;
  const float* statistics;   // (batch, heads_q, rows, 2): LSE to the base 2, and D
  Element* dq;
  Strides dq_strides;
  int len_q;
  int rows;   // len_q, rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kDim = 128;
constexpr int kHeadDimPadded = 128;
constexpr int kTile = 64;       // queries of a tile of the main kernel
constexpr int kThreads = 256;
constexpr float kScale = 0.0883883461f;
constexpr float kNoLse = 3.40282347e+38f;   // of a row with nothing to attend to
// The warps divide a tile of dQ: so many of them along its rows, and along its columns; and the mma tiles of each.
constexpr int kGradientRowWarps = 2;
constexpr int kGradientColumnWarps = 4;
constexpr int kGradientRowTiles = kTile / 16 / kGradientRowWarps;
constexpr int kGradientColumnTiles = kHeadDimPadded / 8 / kGradientColumnWarps;

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // the emulator brings its own

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Two floats, rounded to nearest even, as one register: `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Sums lie in an order of their own, each mma tile's 128 together, so that a warp adds to neighbouring addresses.
__device__ constexpr int sum_place(int lane, int element) { return element * 32 + lane; }

// The place of a sum in its tile, by the warp, the mma tile and the lane of the main kernel that added it up.
__device__ __forceinline__ int sum_index(int row, int column) {
  const int warp = row / (kGradientRowTiles * 16) * kGradientColumnWarps + column / (kGradientColumnTiles * 8);
  const int i = row / 16 % kGradientRowTiles, j = column / 8 % kGradientColumnTiles;
  const int lane = row % 8 * 4 + column % 8 / 2, element = row / 8 % 2 * 2 + column % 2;
  return ((warp * kGradientRowTiles + i) * kGradientColumnTiles + j) * 128 + sum_place(lane, element);
}

// dQ of a tile of queries: the sums times the scale, rounded. Rows with nothing to attend to are 0, whatever K holds.
extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_postprocess_bf16_d128_causal_56b1805a(const __grid_constant__ BackwardPostprocessArguments arguments) {
  constexpr int kChunks = kDim / 8;
  const int first = blockIdx.x * kTile, head = blockIdx.y, batch = blockIdx.z;
  const long long row = (static_cast<long long>(batch) * gridDim.y + head) * arguments.rows + first;
  const float* sums = arguments.dq_accum + row * kHeadDimPadded;
  Element* gradient = arguments.dq + batch * arguments.dq_strides.batch + head * arguments.dq_strides.head;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads) {
    // 16 threads take 16 rows of a chunk of 8 columns: those of one mma tile, whose sums lie together.
    const int own = i / (16 * kChunks) * 16 + i % 16, column = i / 16 % kChunks * 8;
    if (first + own >= arguments.len_q) continue;
    unsigned pairs[4] = {};
    const bool empty = arguments.statistics[(row + own) * 2] == kNoLse;
#pragma unroll
    for (int j = 0; j < 4 && !empty; ++j) {
      const float low = sums[sum_index(own, column + 2 * j)], high = sums[sum_index(own, column + 2 * j + 1)];
      pairs[j] = pack_bf16(low * kScale, high * kScale);
    }
    *reinterpret_cast<uint4*>(gradient + (first + own) * arguments.dq_strides.row + column) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
