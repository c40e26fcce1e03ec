// What every kernel that sums along diagonals has of it, on a tile of 16 x 24.

struct Diagonals {
  const float* tile;
  float* sums;   // by n and lane
};

extern "C" __global__ void diagonals(const __grid_constant__ Diagonals arguments) {
  const int lane = threadIdx.x;
  sum_diagonals<3>(
      [&](int j, int e) { return arguments.tile[(lane / 4 + e / 2 * 8) * 24 + j * 8 + lane % 4 * 2 + e % 2]; },
      [&](int n, float sum) { arguments.sums[n * 32 + lane] = sum; });
}
