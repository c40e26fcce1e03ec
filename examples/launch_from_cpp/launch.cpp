// Launches a kernel of a release folder with the CUDA driver API, and compares its output with attention in plain C++.
// README.md explains how to build and run it.

#include <cuda.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// Headers from `flashgen release build`, one per cubin: entry point, threads, grid, and the struct of arguments.
#include "fwd-sm120-bf16-d64-causal-fbd6f506.h"
#include "fwd-sm80-bf16-d64-causal-fbd6f506.h"
#include "fwd-sm90-bf16-d64-causal-fbd6f506.h"

using Bf16 = unsigned short;   // the bits of a bfloat16, as in the kernels

constexpr int kDim = 64;   // head dim
constexpr int kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kLenQ = 200, kLenK = 330;

// ---- Numbers --------------------------------------------------------------------------------------------------------

double value_of(Bf16 bits) {
  const unsigned word = static_cast<unsigned>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

Bf16 rounded(double value) {   // to nearest, ties to even
  const float single = static_cast<float>(value);
  unsigned word;
  std::memcpy(&word, &single, sizeof word);
  return static_cast<Bf16>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// ---- CUDA's driver API ----------------------------------------------------------------------------------------------

void check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(status, &name);
  std::fprintf(stderr, "%s: %s\n", what, name ? name : "an unknown error");
  std::exit(2);
}

// An array in the GPU's memory.
template <class T>
class GpuArray {
 public:
  explicit GpuArray(size_t count) : bytes_(count * sizeof(T)) {
    check(cuMemAlloc(&address_, bytes_), "cuMemAlloc");
    check(cuMemsetD8(address_, 0xff, bytes_), "cuMemsetD8");   // NaN, so that unwritten elements are noticed
  }
  explicit GpuArray(const std::vector<T>& values) : GpuArray(values.size()) {
    check(cuMemcpyHtoD(address_, values.data(), bytes_), "cuMemcpyHtoD");
  }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;
  ~GpuArray() { cuMemFree(address_); }

  T* pointer() const { return reinterpret_cast<T*>(address_); }
  std::vector<T> values() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cuMemcpyDtoH(values.data(), address_, bytes_), "cuMemcpyDtoH");
    return values;
  }

 private:
  CUdeviceptr address_ = 0;
  size_t bytes_;
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

struct Inputs {
  std::vector<Bf16> q, k, v;   // (batch, heads, length, dim), contiguous
};

struct Outputs {
  std::vector<double> out, lse;
};

// Kernel: one of the structs of the headers.
template <class Kernel>
Outputs launch(const std::string& folder, const Inputs& inputs) {
  CUmodule module;
  CUfunction function;
  check(cuModuleLoad(&module, (folder + "/" + Kernel::kCubin).c_str()), Kernel::kCubin);
  check(cuModuleGetFunction(&function, module, Kernel::kEntry), Kernel::kEntry);
  if (Kernel::kSharedBytes > 48 * 1024) {   // more than 48 KB must be requested
    check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, Kernel::kSharedBytes),
          "cuFuncSetAttribute");
  }

  const GpuArray<Bf16> q(inputs.q), k(inputs.k), v(inputs.v), out(inputs.q.size());
  const GpuArray<float> lse(kBatch * kHeadsQ * kLenQ);

  typename Kernel::Arguments arguments = {};
  arguments.q = q.pointer();
  arguments.k = k.pointer();
  arguments.v = v.pointer();
  arguments.o = out.pointer();
  arguments.lse = lse.pointer();
  arguments.q_strides = arguments.o_strides = {kHeadsQ * kLenQ * kDim, kLenQ * kDim, kDim};   // batch, head, row
  arguments.k_strides = arguments.v_strides = {kHeadsKv * kLenK * kDim, kLenK * kDim, kDim};
  const typename Kernel::Sizes sizes = {kBatch, kHeadsQ, kHeadsKv, kLenQ, kLenK};
  Kernel::set_sizes(arguments, sizes);

  const auto grid = Kernel::grid_of(sizes);
  void* parameters[] = {&arguments};
  check(cuLaunchKernel(function, grid.x, grid.y, grid.z, Kernel::kThreads, 1, 1, Kernel::kSharedBytes, nullptr,
                       parameters, nullptr),
        "cuLaunchKernel");
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  const std::vector<float> sums = lse.values();
  Outputs outputs = {{}, {sums.begin(), sums.end()}};
  for (Bf16 bits : out.values()) outputs.out.push_back(value_of(bits));
  check(cuModuleUnload(module), "cuModuleUnload");
  std::printf("%s, %u x %u x %u blocks of %u threads\n", Kernel::kCubin, grid.x, grid.y, grid.z, Kernel::kThreads);
  return outputs;
}

Outputs launch_on_this_gpu(const std::string& folder, const Inputs& inputs) {
  CUdevice device;
  CUcontext context;
  int major = 0, minor = 0;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute");
  check(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute");
  if (major == 8) return launch<flashgen::fwd_sm80_bf16_d64_causal_fbd6f506>(folder, inputs);
  if (major == 9) return launch<flashgen::fwd_sm90_bf16_d64_causal_fbd6f506>(folder, inputs);
  if (major == 12) return launch<flashgen::fwd_sm120_bf16_d64_causal_fbd6f506>(folder, inputs);
  std::fprintf(stderr, "this GPU is of sm_%d%d: add it to release.toml, and its header and case here\n", major, minor);
  std::exit(2);
}

// ---- Attention in plain C++ -----------------------------------------------------------------------------------------

// Causal attention, with the last query aligned with the last key. `low` rounds scores, probabilities and the output to
// bfloat16.
Outputs attention(const Inputs& inputs, bool low) {
  const auto stored = [low](double value) { return low ? value_of(rounded(value)) : value; };
  Outputs expected = {std::vector<double>(inputs.q.size()), std::vector<double>(kBatch * kHeadsQ * kLenQ)};
  for (int row = 0; row < kBatch * kHeadsQ * kLenQ; ++row) {
    const int query = row % kLenQ, head = row / kLenQ % kHeadsQ, batch = row / kLenQ / kHeadsQ;
    const size_t keys = static_cast<size_t>(batch * kHeadsKv + head / (kHeadsQ / kHeadsKv)) * kLenK * kDim;
    const int count = query + kLenK - kLenQ + 1;
    std::vector<double> scores(count);
    double maximum = -INFINITY, sum = 0;
    for (int key = 0; key < count; ++key) {
      double score = 0;
      for (int i = 0; i < kDim; ++i) {
        score += value_of(inputs.q[row * kDim + i]) * value_of(inputs.k[keys + key * kDim + i]);
      }
      scores[key] = stored(score / std::sqrt(static_cast<double>(kDim)));
      maximum = std::fmax(maximum, scores[key]);
    }
    for (double score : scores) sum += std::exp(score - maximum);
    expected.lse[row] = maximum + std::log(sum);
    for (int key = 0; key < count; ++key) {
      const double probability = stored(std::exp(scores[key] - maximum) / sum);
      for (int i = 0; i < kDim; ++i) {
        expected.out[row * kDim + i] += probability * value_of(inputs.v[keys + key * kDim + i]);
      }
    }
    for (int i = 0; i < kDim; ++i) expected.out[row * kDim + i] = stored(expected.out[row * kDim + i]);
  }
  return expected;
}

// ---- The comparison -------------------------------------------------------------------------------------------------

std::vector<Bf16> random_array(size_t count, unsigned seed) {   // approximately normal
  std::vector<Bf16> values(count);
  for (Bf16& value : values) {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += ((seed = seed * 1664525 + 1013904223) >> 8) / 16777216.0;
    value = rounded(sum);
  }
  return values;
}

// The largest difference, or NaN if there is one.
double distance(const std::vector<double>& ours, const std::vector<double>& theirs) {
  double maximum = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double difference = std::fabs(ours[i] - theirs[i]);
    if (std::isnan(difference)) return difference;
    maximum = std::fmax(maximum, difference);
  }
  return maximum;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER (from `flashgen release build`)\n", argv[0]);
    return 2;
  }
  const size_t queries = kBatch * kHeadsQ * kLenQ * kDim, keys = kBatch * kHeadsKv * kLenK * kDim;
  const Inputs inputs = {random_array(queries, 1), random_array(keys, 2), random_array(keys, 3)};
  const Outputs found = launch_on_this_gpu(argv[1], inputs);
  const Outputs exact = attention(inputs, false), low = attention(inputs, true);

  const double error = distance(found.out, exact.out), lse_error = distance(found.lse, exact.lse);
  const double bound = 2 * distance(low.out, exact.out) + 1e-5;
  const bool ok = error <= bound && lse_error <= 1e-3;
  std::printf("output off by %.2e, allowed %.2e; log-sum-exp off by %.2e, allowed 1e-3: %s\n", error, bound, lse_error,
              ok ? "ok" : "FAILED");
  return ok ? 0 : 1;
}
