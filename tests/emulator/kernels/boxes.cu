// TMA on its own: a box to shared memory and out again as it lies there, and the other way round.

struct Box {
  TensorMap map;
  unsigned* raw;   // shared memory: kBoxBytes of it
  int c0, c1, c2, c3;
};

extern "C" __global__ void __launch_bounds__(64) load_box(const __grid_constant__ Box arguments) {
  const unsigned tile = shared_address(shared_memory), barrier = tile + kBoxBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    mbarrier_arrive_expect_bytes(barrier, kBoxBytes);
    tma_load_4d(tile, arguments.map, barrier, arguments.c0, arguments.c1, arguments.c2, arguments.c3);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < kBoxBytes / 4; i += 64) arguments.raw[i] = reinterpret_cast<unsigned*>(shared_memory)[i];
}

extern "C" __global__ void __launch_bounds__(64) store_box(const __grid_constant__ Box arguments) {
  for (int i = threadIdx.x; i < kBoxBytes / 4; i += 64) reinterpret_cast<unsigned*>(shared_memory)[i] = arguments.raw[i];
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x < 32 && elect_one()) {
    tma_store_4d(arguments.map, shared_address(shared_memory), arguments.c0, arguments.c1, arguments.c2, arguments.c3);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

extern "C" __global__ void __launch_bounds__(64) add_box(const __grid_constant__ Box arguments) {
  for (int i = threadIdx.x; i < kBoxBytes / 4; i += 64) reinterpret_cast<unsigned*>(shared_memory)[i] = arguments.raw[i];
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x < 32 && elect_one()) {
    tma_reduce_add_4d(arguments.map, shared_address(shared_memory), arguments.c0, arguments.c1, arguments.c2,
                      arguments.c3);
    bulk_commit();
    bulk_wait_read<0>();
  }
}
