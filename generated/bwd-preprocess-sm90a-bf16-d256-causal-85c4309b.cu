// flashgen: attention backward, preprocess, bf16-d256-causal-85c4309b
// Computes the base-2 LSE and D = rowsum(dO * O) - dLSE of each row.
//
// mask     causal()
// score    none; scale 0.0625
// dropout  0
// dims     head 256, value 256; bfloat16, accumulated in float32
// target   sm_90a, family hopper
// FLOPs    512 * batch * heads_q * len_q
// HBM      1036 * batch * heads_q * len_q bytes, at least
//
// Grid: one CTA per (group of rows, query head, batch). Reproduce with
//   flashgen show --pass backward --kernel preprocess --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":256,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.0625,"score":null,"value_dim":256,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct BackwardPreprocessArguments {
  const Element* o;
  const Element* d_o;
  const float* lse;
  const float* d_lse;   // gradient of the LSE, or null
  float* lse_and_d;
  Strides o_strides;
  Strides d_o_strides;
  int heads_q;
  int len_q;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kValueDim = 256;
constexpr int kThreads = 256;
constexpr int kRows = 64;            // per CTA
constexpr int kLanes = 32;           // per row, with 8 elements each
constexpr int kRowsAtOnce = kThreads / kLanes;
constexpr float kLog2E = 1.44269504f;
constexpr float kNoLse = 3.40282347e+38f;   // marks a row whose scores are all masked: it makes every P of the row 0
static_assert(kLanes * 8 >= kValueDim && kRows % kRowsAtOnce == 0, "a CTA covers all elements of its rows");

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Returns the float that 16 bits represent.
__device__ __forceinline__ float unpack_bf16(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

#endif

// Returns -inf.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Returns the dot product of 8 pairs of elements.
__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
  const unsigned pairs_x[4] = {x.x, x.y, x.z, x.w}, pairs_y[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += unpack_bf16(pairs_x[i] & 0xffff) * unpack_bf16(pairs_y[i] & 0xffff);
    sum += unpack_bf16(pairs_x[i] >> 16) * unpack_bf16(pairs_y[i] >> 16);
  }
  return sum;
}

// Writes LSE and D of each row: its log-sum-exp (LSE) to the base 2, and D = rowsum(dO * O), less the gradient of
// the LSE if there is one. Rows beyond the last query, and rows whose scores are all masked, get kNoLse and a D of 0.
extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_preprocess_bf16_d256_causal_85c4309b(const __grid_constant__ BackwardPreprocessArguments arguments) {
  const int head = blockIdx.y, batch = blockIdx.z;
  const long long first_lse = (static_cast<long long>(batch) * arguments.heads_q + head) * arguments.len_q;
  const long long workspace_row = (static_cast<long long>(batch) * arguments.heads_q + head) * arguments.rows;
  const Element* o = arguments.o + batch * arguments.o_strides.batch + head * arguments.o_strides.head;
  const Element* d_o = arguments.d_o + batch * arguments.d_o_strides.batch + head * arguments.d_o_strides.head;
  const int first = blockIdx.x * kRows;

  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce + threadIdx.x / kLanes;
    float d = 0.0f;
    if (row < arguments.len_q && lane * 8 < kValueDim) {
      d = dot(*reinterpret_cast<const uint4*>(o + row * arguments.o_strides.row + lane * 8),
              *reinterpret_cast<const uint4*>(d_o + row * arguments.d_o_strides.row + lane * 8));
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) d += __shfl_xor_sync(0xffffffffu, d, distance);
    if (lane != 0) continue;
    float lse = minus_infinity();
    if (row < arguments.len_q) {
      if (arguments.d_lse) d -= arguments.d_lse[first_lse + row];
      lse = arguments.lse[first_lse + row] * kLog2E;
    }
    if (lse == minus_infinity()) {
      lse = kNoLse;
      d = 0.0f;
    }
    *reinterpret_cast<float2*>(arguments.lse_and_d + (workspace_row + row) * 2) = make_float2(lse, d);
  }
}
