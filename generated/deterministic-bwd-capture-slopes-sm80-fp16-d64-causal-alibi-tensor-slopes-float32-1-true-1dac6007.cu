// flashgen: attention backward, d_slopes, fp16-d64-causal-alibi-tensor-slopes-float32-1-true-1dac6007
// Converts the accumulated gradient of a captured array to its type.
//
// mask     causal()
// score    alibi(Tensor('slopes', 'float32', ndim=1, grad=True)); scale 0.125
// dropout  0
// dims     head 64, value 64; float16, accumulated in float32
// target   sm_80, family ampere
// FLOPs    none
// HBM      68 * elements of slopes bytes, at least
//
// Grid: one CTA per 256 elements of the array. Reproduce with
//   flashgen show --pass backward --kernel d_slopes --deterministic --target sm_80 '{"dropout":0.0,"dtype":"float16","head_dim":64,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.125,"score":{"expression":["Add","score",["Mul",["Load",{"capture":"slopes","dtype":"float32","grad":true,"ndim":1},"h"],["Sub","k","q"]]],"name":"alibi(Tensor('"'"'slopes'"'"', '"'"'float32'"'"', ndim=1, grad=True))"},"value_dim":64,"version":1}'

using Element = unsigned short;   // the bits of a float16

struct BackwardCaptureArguments {
  const long long* sums;
  float* gradient;   // gradient of slopes, float32
  long long count;
};

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Converts a fixed-point number of 10 limbs of 28 bits, the lowest of which is 2^-149, to float. The highest limb of a
// sum with an infinite or NaN addend has a bit set that no sum of finite addends reaches, and gives NaN.
__device__ __forceinline__ float float_from_limbs(const long long* limbs) {
  double sum = 0.0, weight = 1.40129846432481707e-45;   // 2^-149
#pragma unroll
  for (int limb = 0; limb < 10; ++limb, weight *= 268435456.0) sum += static_cast<double>(limbs[limb]) * weight;
  return limbs[9] >> 61 > 0 ? __int_as_float(0x7fffffff) : static_cast<float>(sum);
}

// Rounds the sums to the type of the captured array.
extern "C" __global__ void __launch_bounds__(256)
attention_backward_capture_slopes_fp16_d64_causal_alibi_tensor_slopes_float32_1_true_1dac6007(const __grid_constant__ BackwardCaptureArguments arguments) {
  const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= arguments.count) return;
  const float sum = float_from_limbs(arguments.sums + i * 10);
  arguments.gradient[i] = sum;
}
