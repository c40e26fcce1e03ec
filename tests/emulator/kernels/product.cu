// One product of a warpgroup, d (64 x kColumns) = a (64 x kDepth) * b, by every way in which wgmma takes its operands.
// b is kColumns x kDepth, or, transposed, kDepth x kColumns. TMA brings tiles as panels of kPanel columns side by side.

constexpr int kPanel = kSwizzle ? kSwizzle / 2 : 8;
constexpr int kPitch = kPanel * 2;   // bytes of a panel's row
constexpr int kRowsB = kTransposed ? kDepth : kColumns, kColumnsB = kTransposed ? kColumns : kDepth;
constexpr int kPanelsA = (kDepth + kPanel - 1) / kPanel, kPanelsB = (kColumnsB + kPanel - 1) / kPanel;
constexpr int kBytesA = kPanelsA * 64 * kPitch, kBytesB = kPanelsB * kRowsB * kPitch;
constexpr int kOffsetB = (kBytesA + 1023) / 1024 * 1024, kOffsetBarrier = (kOffsetB + kBytesB + 7) / 8 * 8;

struct Product {
  TensorMap a_map, b_map;
  const unsigned short* a;   // what a_map shows, for operands in registers
  float* d;                  // accumulated upon
  int accumulate;
};

__device__ __forceinline__ void load_panels(unsigned tile, const TensorMap& map, unsigned barrier, int panels, int rows) {
  for (int panel = 0; panel < panels; ++panel)
    tma_load_4d(tile + panel * rows * kPitch, map, barrier, panel * kPanel, 0, 0, 0);
}

// Rows of a tile that run along the depth, from column `depth` on.
__device__ __forceinline__ unsigned long long along_depth(unsigned tile, int rows, int depth) {
  const unsigned panel = tile + depth / kPanel * rows * kPitch;
  return matrix_descriptor<kSwizzle>(panel + depth % kPanel * 2, rows * kPitch, 8 * kPitch);
}

// A tile whose rows are the depth, from row `depth` on.
__device__ __forceinline__ unsigned long long across_depth(unsigned tile, int depth) {
  const unsigned panel_bytes = kRowsB * kPitch, group_bytes = 8 * kPitch;
  return kSwizzle ? matrix_descriptor<kSwizzle>(tile + depth * kPitch, panel_bytes, group_bytes)
                  : matrix_descriptor<kSwizzle>(tile + depth * kPitch, group_bytes, panel_bytes);
}

__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], unsigned a, unsigned b, const Product& arguments) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  unsigned fragments[kDepth / 16][4];
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) {
    const int at = (row + i % 2 * 8) * kDepth + column + i / 4 * 16 + i % 4 / 2 * 8;
    fragments[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(arguments.a + at);
  }
  order_registers(d);
  wgmma_fence();
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    const bool accumulate = depth > 0 || arguments.accumulate;
    const unsigned long long b_tile = kTransposed ? across_depth(b, depth) : along_depth(b, kRowsB, depth);
    MULTIPLY
  }
  wgmma_commit();
  wgmma_wait<0>();
  order_registers(d);
}

extern "C" __global__ void __launch_bounds__(128, 1) product(const __grid_constant__ Product arguments) {
  const unsigned shared = shared_address(shared_memory), a = shared, b = shared + kOffsetB;
  const unsigned barrier = shared + kOffsetBarrier;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_fence_init();
    mbarrier_arrive_expect_bytes(barrier, kBytesA + kBytesB);
    load_panels(a, arguments.a_map, barrier, kPanelsA, 64);
    load_panels(b, arguments.b_map, barrier, kPanelsB, kRowsB);
  }
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float d[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    d[i] = arguments.d[(row + i / 2 % 2 * 8) * kColumns + column + i / 4 * 8 + i % 2];
  __syncthreads();
  mbarrier_wait(barrier, 0);
  multiply(d, a, b, arguments);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    arguments.d[(row + i / 2 % 2 * 8) * kColumns + column + i / 4 * 8 + i % 2] = d[i];
}
