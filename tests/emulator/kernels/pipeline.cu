// c = a * b^T with everything that a fast kernel has: a warpgroup that loads, two that compute in turns, stages guarded by
// mbarriers, registers that change hands, and a result that leaves by stmatrix and TMA.

constexpr int kRows = 128, kColumns = 64, kDepth = 32;   // of a step
constexpr int kSwizzle = kDepth * 2, kOffsetB = kRows * kSwizzle, kStageBytes = (kRows + kColumns) * kSwizzle;
constexpr int kOffsetResult = kStages * kStageBytes, kOffsetBarriers = kOffsetResult + kRows * kColumns * 2;

struct Pipeline {
  TensorMap a_map, b_map, c_map;
  int tiles;   // of kRows rows
  int steps;   // of kDepth
};

__device__ __forceinline__ unsigned stage(int use) { return shared_address(shared_memory) + use % kStages * kStageBytes; }
__device__ __forceinline__ unsigned full(int use) { return shared_address(shared_memory) + kOffsetBarriers + use % kStages * 16; }
__device__ __forceinline__ unsigned empty(int use) { return full(use) + 8; }
__device__ __forceinline__ unsigned parity(int use) { return use / kStages % 2; }

__device__ __forceinline__ void load(const Pipeline& arguments) {
  for (int use = 0; use < arguments.tiles * arguments.steps; ++use) {
    const int tile = use / arguments.steps, step = use % arguments.steps;
    mbarrier_wait(empty(use), parity(use) ^ 1);
    mbarrier_arrive_expect_bytes(full(use), kStageBytes);
    tma_load_4d(stage(use), arguments.a_map, full(use), step * kDepth, tile * kRows, 0, 0);
    tma_load_4d(stage(use) + kOffsetB, arguments.b_map, full(use), step * kDepth, 0, 0, 0);
  }
}

__device__ __forceinline__ void write(const float (&d)[kColumns / 2], int tile, int group, bool elected,
                                      const Pipeline& arguments) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane % 16;
  const unsigned rows = shared_address(shared_memory) + kOffsetResult + group * 64 * kColumns * 2;
  if (elected) bulk_wait_read<0>();   // of the tile before
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const unsigned place = rows + row * 128 + ((j + lane / 16) ^ row % 8) * 16;
    store_matrix_x4(place, pack_f16(d[4 * j], d[4 * j + 1]), pack_f16(d[4 * j + 2], d[4 * j + 3]),
                    pack_f16(d[4 * j + 4], d[4 * j + 5]), pack_f16(d[4 * j + 6], d[4 * j + 7]));
  }
  fence_async_shared();
  __syncwarp();
  if (elected) {
    tma_store_4d(arguments.c_map, rows + warp * 16 * 128, 0, tile * kRows + group * 64 + warp * 16, 0, 0);
    bulk_commit();
  }
}

__device__ __forceinline__ void compute(int group, const Pipeline& arguments) {
  const int lane = threadIdx.x % 32, uses = arguments.tiles * arguments.steps;
  const bool elected = elect_one();
  float d[kColumns / 2];
  if (group == 1) named_barrier_arrive(1, 256);   // the first turn is group 0's
  for (int use = 0; use < uses; ++use) {
    mbarrier_wait(full(use), parity(use));
    named_barrier_sync(1 + group, 256);
    const unsigned a = stage(use) + group * 64 * kSwizzle, b = stage(use) + kOffsetB;
    order_registers(d);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
      wgmma_shared_f16<kColumns, false>(d, matrix_descriptor<kSwizzle>(a + depth * 2, 16, 8 * kSwizzle),
                                        matrix_descriptor<kSwizzle>(b + depth * 2, 16, 8 * kSwizzle),
                                        use % arguments.steps > 0 || depth > 0);
    }
    wgmma_commit();
    if (group == 0 || use + 1 < uses) named_barrier_arrive(2 - group, 256);
    wgmma_wait<0>();
    order_registers(d);
    if (lane == 0) mbarrier_arrive(empty(use));
    if ((use + 1) % arguments.steps == 0) write(d, use / arguments.steps, group, elected, arguments);
  }
  if (elected) bulk_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(384, 1) pipeline(const __grid_constant__ Pipeline arguments) {
  if (threadIdx.x == 0) {
    for (int use = 0; use < kStages; ++use) {
      mbarrier_init(full(use), 1);
      mbarrier_init(empty(use), 8);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 2) {
    registers_decrease<40>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) load(arguments);
  } else {
    registers_increase<232>();
    compute(group, arguments);
  }
}
