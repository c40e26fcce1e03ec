// stmatrix, named barriers, setmaxnreg and elect: a warpgroup hands numbers to another; a third takes registers.

struct Exchange {
  unsigned* stored;    // 32 x 4: a warp's stmatrix, as it lies in shared memory
  unsigned* received;  // 4 x 128
  int* elected;        // how many lanes of each of the 12 warps
};

extern "C" __global__ void __launch_bounds__(384, 1) exchange(const __grid_constant__ Exchange arguments) {
  unsigned* cells = reinterpret_cast<unsigned*>(shared_memory);
  const int t = threadIdx.x % 128, lane = threadIdx.x % 32;
  if (threadIdx.x < 128) {
    registers_decrease<40>();
    for (int i = 0; i < 4; ++i) {
      named_barrier_sync(2, 256);   // the cells are free
      cells[t] = 1000 * i + t;
      named_barrier_arrive(1, 256);
    }
  } else if (threadIdx.x < 256) {
    registers_increase<232>();
    named_barrier_arrive(2, 256);
    for (int i = 0; i < 4; ++i) {
      named_barrier_sync(1, 256);
      arguments.received[128 * i + t] = cells[127 - t];
      if (i < 3) named_barrier_arrive(2, 256);
    }
  } else {
    registers_increase<232>();
  }
  if (elect_one()) atomicAdd(arguments.elected + threadIdx.x / 32, 1);
  if (threadIdx.x >= 32) return;
  // Matrix m, row r, columns 2p and 2p + 1 hold 100 m + 8 r + p; lane l has row l / 4 and p = l % 4 of each.
  const unsigned value = lane / 4 * 8 + lane % 4;
  store_matrix_x4(shared_address(cells + 128 + lane * 4), value, 100 + value, 200 + value, 300 + value);
  __syncwarp();
  for (int i = 0; i < 4; ++i) arguments.stored[lane * 4 + i] = cells[128 + lane * 4 + i];
}
