// The copy engine on runs of bytes: numbers to shared memory, and added from there to others; 8x8 matrices stored
// transposed.

struct Runs {
  float *source, *sums;
  unsigned* stored;   // 32 x 4
};

extern "C" __global__ void __launch_bounds__(64) add_run(const __grid_constant__ Runs arguments) {
  const unsigned run = shared_address(shared_memory), barrier = run + kRunBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    mbarrier_arrive_expect_bytes(barrier, kRunBytes);
    bulk_load(run, arguments.source, kRunBytes, barrier);
  }
  mbarrier_wait(barrier, 0);
  float* const numbers = reinterpret_cast<float*>(shared_memory);
  for (int i = threadIdx.x; i < kRunBytes / 4; i += 64) numbers[i] *= 2.0f;
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x < 32 && elect_one()) {
    bulk_reduce_add(arguments.sums, run, kRunBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

extern "C" __global__ void __launch_bounds__(32) store_transposed(const __grid_constant__ Runs arguments) {
  // Matrix m, row r, columns 2p and 2p + 1 hold 64 m + 8 r + 2 p and one more; lane l has row l / 4 and p = l % 4 of each.
  const unsigned lane = threadIdx.x, low = lane / 4 * 8 + lane % 4 * 2, pair = low | (low + 1) << 16;
  const unsigned next = 64 | 64 << 16;
  unsigned* const cells = reinterpret_cast<unsigned*>(shared_memory);
  store_matrix_x4_transposed(shared_address(cells + lane * 4), pair, pair + next, pair + 2 * next, pair + 3 * next);
  __syncwarp();
  for (int i = 0; i < 4; ++i) arguments.stored[lane * 4 + i] = cells[lane * 4 + i];
}
