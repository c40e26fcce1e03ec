// A wgmma of operands that ordinary stores wrote: each warp its own 16 rows of a by stmatrix, all of them b.

struct Operands {
  const unsigned* a;   // 64 x 16, in fragments as of mma: by warp, lane and register
  const unsigned* b;   // 32 x 16
  float* d;            // 64 x 32
};

extern "C" __global__ void __launch_bounds__(128, 1) written_operands(const __grid_constant__ Operands arguments) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned a = shared_address(shared_memory), b = a + 2048;
  const unsigned* fragment = arguments.a + threadIdx.x * 4;
  // Unswizzled: 8 rows of 16 bytes are a block; that of columns 8 to 15 comes after all of columns 0 to 7.
  const unsigned row = a + lane / 16 * 1024 + (warp * 16 + lane % 16) * 16;
  store_matrix_x4(row, fragment[0], fragment[1], fragment[2], fragment[3]);
  for (int i = threadIdx.x; i < 256; i += 128)
    reinterpret_cast<unsigned*>(shared_memory)[512 + i / 4 % 2 * 128 + i / 8 * 4 + i % 4] = arguments.b[i];
  fence_async_shared();
  __syncthreads();
  float d[16];
  order_registers(d);
  wgmma_fence();
  wgmma_shared_f16<32, false>(d, matrix_descriptor<0>(a, 1024, 128), matrix_descriptor<0>(b, 512, 128), false);
  wgmma_commit();
  wgmma_wait<0>();
  order_registers(d);
  for (int i = 0; i < 16; ++i)
    arguments.d[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
