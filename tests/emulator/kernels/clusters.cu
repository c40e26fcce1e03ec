// Clusters: each warp passes numbers to the same warp of the other block, through kStages stages of its shared memory.

struct Clusters {
  unsigned* received;   // blocks x kSteps x 64 x 4
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64, 1)
pass(const __grid_constant__ Clusters arguments) {
  const unsigned shared = shared_address(shared_memory), peer = blockIdx.x % 2 ^ 1, t = threadIdx.x;
  const unsigned barriers = shared + kStages * 1024;
  if (t == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers + stage * 16, 1);       // full
      mbarrier_init(barriers + stage * 16 + 8, 2);   // empty
      mbarrier_arrive_expect_bytes(barriers + stage * 16, 1024);
    }
    mbarrier_fence_init();
  }
  __syncwarp();
  cluster_sync();
  for (int step = 0; step < kSteps; ++step) {
    const int stage = step % kStages, parity = step / kStages & 1;
    const unsigned full = barriers + stage * 16, empty = full + 8, slot = shared + stage * 1024 + t * 16;
    mbarrier_wait(empty, parity ^ 1);
    const unsigned number = blockIdx.x * 100000 + step * 1000 + t * 10;
    remote_store_16(remote_address(slot, peer), number, number + 1, number + 2, number + 3, remote_address(full, peer));
    mbarrier_wait(full, parity);
    if (t == 0) mbarrier_arrive_expect_bytes(full, 1024);   // of the next phase
    const uint4 four = *reinterpret_cast<const uint4*>(shared_memory + (slot - shared));
    __syncwarp();
    if (t % 32 == 0) remote_arrive(remote_address(empty, peer));
    unsigned* const received = arguments.received + ((blockIdx.x * kSteps + step) * 64 + t) * 4;
    received[0] = four.x, received[1] = four.y, received[2] = four.z, received[3] = four.w;
  }
  __syncwarp();
  cluster_sync();
}
