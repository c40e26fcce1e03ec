// CUDA's own functions, one kernel for each kind.

struct Lanes {
  int* out;        // results x 32 lanes
  int width, by;
};

extern "C" __global__ void shuffles(const __grid_constant__ Lanes arguments) {
  const int lane = threadIdx.x, value = 100 + lane;
  int* out = arguments.out + lane;
  out[0] = __shfl_sync(0xffffffffu, value, arguments.by, arguments.width);
  out[32] = __shfl_xor_sync(0xffffffffu, value, arguments.by, arguments.width);
  out[64] = __shfl_up_sync(0xffffffffu, value, arguments.by, arguments.width);
  out[96] = __shfl_down_sync(0xffffffffu, value, arguments.by, arguments.width);
  out[128] = (int)__shfl_xor_sync(0xffffffffu, value + 0.5f, arguments.by, arguments.width);
  const long long wide = value * 1000000000000ll;
  out[160] = (int)(__shfl_xor_sync(0xffffffffu, wide, arguments.by, arguments.width) / 1000000000000ll);
}

struct Votes {
  const int* in;
  unsigned* out;   // 3 x 64 by warp, then 3 x 64 by block
};

extern "C" __global__ void votes(const __grid_constant__ Votes arguments) {
  const int t = threadIdx.x, predicate = arguments.in[t];
  unsigned* out = arguments.out + t;
  out[0] = __ballot_sync(0xffffffffu, predicate);
  out[64] = __any_sync(0xffffffffu, predicate);
  out[128] = __all_sync(0xffffffffu, predicate);
  out[192] = __syncthreads_or(predicate);
  out[256] = __syncthreads_and(predicate);
  out[320] = __syncthreads_count(predicate);
}

// Lanes of a warp work in two groups, each with its own mask.
extern "C" __global__ void half_warps(const __grid_constant__ Lanes arguments) {
  const int lane = threadIdx.x;
  int value = lane;
  if (lane < 16) {
    for (int i = 1; i < 16; i *= 2) value += __shfl_xor_sync(0x0000ffffu, value, i);
  } else {
    for (int i = 1; i < 16; i *= 2) value = max(value, __shfl_xor_sync(0xffff0000u, value, i));
  }
  __syncwarp();
  arguments.out[lane] = value;
}

struct Integers {
  const unsigned* a;
  const unsigned* b;
  int* out;   // 10 x count
  int count;
};

extern "C" __global__ void integers(const __grid_constant__ Integers arguments) {
  const int n = arguments.count;
  for (int i = threadIdx.x; i < n; i += 32) {
    const unsigned a = __ldg(arguments.a + i), b = __ldg(arguments.b + i);
    int* out = arguments.out + i;
    out[0 * n] = __popc(a);
    out[1 * n] = __ffs(a);
    out[2 * n] = __clz(a);
    out[3 * n] = __umulhi(a, b);
    out[4 * n] = __mulhi(a, b);
    out[5 * n] = __brev(a);
    out[6 * n] = min((int)a, (int)b);
    out[7 * n] = max((int)a, b);
    out[8 * n] = __byte_perm(a, b, 0x5140);
    out[9 * n] = __float_as_int(__int_as_float(a));
  }
}

struct Counters {
  int* sum;
  float* total;
  unsigned* highest;
  unsigned* tickets;   // one for each thread of the grid
  unsigned* next;
  unsigned* wrapping;
};

extern "C" __global__ void atomics(const __grid_constant__ Counters arguments) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(arguments.sum, -2);
  atomicAdd(arguments.total, 0.5f);
  atomicMax(arguments.highest, thread);
  arguments.tickets[thread] = atomicAdd(arguments.next, 1);
  atomicInc(arguments.wrapping, 99);
}

struct Vectors {
  const float4* in;
  float4* out;
  const long long* wide_in;
  long long* wide_out;
  const unsigned char* byte_in;
  unsigned char* byte_out;
};

extern "C" __global__ void vectors(const __grid_constant__ Vectors arguments) {
  const float4 v = __ldg(arguments.in + threadIdx.x);
  arguments.out[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
  arguments.wide_out[threadIdx.x] = __ldg(arguments.wide_in + threadIdx.x);
  arguments.byte_out[threadIdx.x] = __ldg(arguments.byte_in + threadIdx.x);
}

struct Places {
  int* out;
};

extern "C" __global__ void places(const __grid_constant__ Places arguments) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  arguments.out[block * threads + thread] = block * 1000 + thread;
}

// Threads that have ended do not count at a barrier.
extern "C" __global__ void early_exit(const __grid_constant__ Places arguments) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  arguments.out[threadIdx.x] = __syncthreads_count(1);
}
