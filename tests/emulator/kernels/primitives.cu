// One kernel for each primitive, so that its host meaning can be compared with NumPy.

struct Conversion {
  const float* in;
  unsigned* packed;            // float16 pairs, then bfloat16 pairs
  const unsigned short* bits;
  float* unpacked;             // of float16, then of bfloat16
  int count;
};

extern "C" __global__ void convert(const __grid_constant__ Conversion arguments) {
  const int n = arguments.count;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    arguments.packed[i] = pack_f16(arguments.in[2 * i], arguments.in[2 * i + 1]);
    arguments.packed[n + i] = pack_bf16(arguments.in[2 * i], arguments.in[2 * i + 1]);
    arguments.unpacked[i] = unpack_f16(arguments.bits[i]);
    arguments.unpacked[n + i] = unpack_bf16(arguments.bits[i]);
  }
}

struct Approximations {
  const float* in;
  float* out;   // 2**x, log2(x), tanh(x)
  int count;
};

extern "C" __global__ void approximate(const __grid_constant__ Approximations arguments) {
  for (int i = threadIdx.x; i < arguments.count; i += blockDim.x) {
    arguments.out[i] = exp2_approx(arguments.in[i]);
    arguments.out[arguments.count + i] = log2_approx(arguments.in[i]);
    arguments.out[2 * arguments.count + i] = tanh_approx(arguments.in[i]);
  }
}

struct Product {
  const unsigned short* a;   // 16 x 16
  const unsigned short* b;   // 16 x 8
  float* d;                  // 16 x 8, accumulated upon
  int kind;                  // 0 float16, 1 bfloat16, 2 float16 as two products of depth 8
};

// Fragments are gathered element by element here, from PTX's tables, so that ldmatrix is not needed to check mma.
extern "C" __global__ void multiply(const __grid_constant__ Product arguments) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  unsigned a[4];
  for (int i = 0; i < 4; ++i) {
    const unsigned short* pair = arguments.a + (g + i % 2 * 8) * 16 + t + i / 2 * 8;
    a[i] = pair[0] | (unsigned)pair[1] << 16;
  }
  unsigned b[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned short* pair = arguments.b + (t + i * 8) * 8 + g;
    b[i] = pair[0] | (unsigned)pair[8] << 16;
  }
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = arguments.d[(g + i / 2 * 8) * 8 + t + i % 2];
  if (arguments.kind == 0) mma_m16n8k16_f16(d, a, b[0], b[1]);
  if (arguments.kind == 1) mma_m16n8k16_bf16(d, a, b[0], b[1]);
  if (arguments.kind == 2) mma_m16n8k8x2_f16(d, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) arguments.d[(g + i / 2 * 8) * 8 + t + i % 2] = d[i];
}

struct Matrices {
  const unsigned short* in;   // 4 matrices of 8 x 8
  unsigned* fragments;        // 32 lanes x 4 registers: plain, then transposed
};

extern "C" __global__ void load_matrices(const __grid_constant__ Matrices arguments) {
  unsigned short* matrices = reinterpret_cast<unsigned short*>(shared_memory);
  for (int i = threadIdx.x; i < 256; i += 32) matrices[i] = arguments.in[i];
  __syncwarp();
  unsigned plain[4], transposed[4];
  load_matrix_x4(plain, shared_address(matrices + threadIdx.x * 8));
  load_matrix_x4_transposed(transposed, shared_address(matrices + threadIdx.x * 8));
  for (int i = 0; i < 4; ++i) {
    arguments.fragments[threadIdx.x * 4 + i] = plain[i];
    arguments.fragments[128 + threadIdx.x * 4 + i] = transposed[i];
  }
}

struct Pairs {
  unsigned* pairs;   // 8 x 8 elements of 16 bits
};

extern "C" __global__ void transpose(const __grid_constant__ Pairs arguments) {
  arguments.pairs[threadIdx.x] = transpose_matrix(arguments.pairs[threadIdx.x]);
}

struct Copies {
  const uint4* in;
  uint4* out;      // by cp.async, then at once
  int valid;       // lanes from here on copy zeros
};

extern "C" __global__ void copy(const __grid_constant__ Copies arguments) {
  const int lane = threadIdx.x;
  uint4* tile = reinterpret_cast<uint4*>(shared_memory);
  const bool valid = lane < arguments.valid;
  copy_async_16(shared_address(tile + lane), valid ? arguments.in + lane : nullptr, valid);
  copy_async_commit();
  copy_sync_16(shared_address(tile + 32 + lane), valid ? arguments.in + lane : nullptr, valid);
  copy_async_wait<0>();
  arguments.out[lane] = tile[lane];
  arguments.out[32 + lane] = tile[32 + lane];
}

struct Groups {
  const uint4* in;   // 3 x 32
  uint4* out;        // what is seen with 2, 1 and 0 groups pending
};

extern "C" __global__ void wait_in_steps(const __grid_constant__ Groups arguments) {
  const int lane = threadIdx.x;
  uint4* tile = reinterpret_cast<uint4*>(shared_memory);
  for (int group = 0; group < 3; ++group) {
    copy_async_16(shared_address(tile + group * 32 + lane), arguments.in + group * 32 + lane, true);
    copy_async_commit();
  }
  uint4* out = arguments.out + lane;
  copy_async_wait<2>();
  for (int group = 0; group < 3; ++group) out[group * 32] = tile[group * 32 + lane];
  copy_async_wait<1>();
  for (int group = 0; group < 3; ++group) out[96 + group * 32] = tile[group * 32 + lane];
  copy_async_wait<0>();
  for (int group = 0; group < 3; ++group) out[192 + group * 32] = tile[group * 32 + lane];
}

struct Counts {
  unsigned* counter;
  unsigned* before;   // of each thread
  unsigned last;
};

extern "C" __global__ void count(const __grid_constant__ Counts arguments) {
  arguments.before[threadIdx.x] = atomic_inc_acq_rel(arguments.counter, arguments.last);
}
