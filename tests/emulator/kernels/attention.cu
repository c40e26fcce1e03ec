// A small attention in the style of the emitted kernels: double-buffered tiles by cp.async, ldmatrix, mma, an online
// softmax, and an output that is staged in shared memory. Tests plant faults by replacing the marked lines.

constexpr int kDim = 32;
constexpr int kTile = 32;                      // queries of a block, keys of a step
constexpr int kRowBytes = kDim * 2;
constexpr int kTileBytes = kTile * kRowBytes;
constexpr int kThreads = 64;
constexpr int kSharedBytes = 5 * kTileBytes;   // Q, two of K, two of V

struct Arguments {
  const unsigned short* q;
  const unsigned short* k;
  const unsigned short* v;
  unsigned short* out;
  long long stride_head, stride_row;   // in elements
  int len_q, len_k;
  float scale_log2;
};

// The byte offset of a 16-byte chunk in a tile; chunks are permuted within rows against bank conflicts.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row >> 1 & 3)) * 16);
}

__device__ __forceinline__ void copy_tile(unsigned tile, const unsigned short* source, long long stride, int first,
                                          int rows) {
#pragma unroll
  for (int i = threadIdx.x; i < kTile * 4; i += kThreads) {
    const int row = i / 4, chunk = i % 4;
    const bool valid = first + row < rows;
    copy_async_16(tile + chunk_offset(row, chunk), source + (valid ? (first + row) * stride : 0) + chunk * 8, valid);
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

extern "C" __global__ void __launch_bounds__(kThreads) attention(const __grid_constant__ Arguments arguments) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_query = blockIdx.x * kTile;
  const long long head = blockIdx.y * arguments.stride_head;
  const unsigned q_tile = shared_address(shared_memory), k_tiles = q_tile + kTileBytes;
  const unsigned v_tiles = k_tiles + 2 * kTileBytes;
  const float infinity = __int_as_float(0x7f800000);

  copy_tile(q_tile, arguments.q + head, arguments.stride_row, first_query, arguments.len_q);
  copy_tile(k_tiles, arguments.k + head, arguments.stride_row, 0, arguments.len_k);
  copy_tile(v_tiles, arguments.v + head, arguments.stride_row, 0, arguments.len_k);
  copy_async_commit();

  float output[4][4] = {}, row_max[2] = {-infinity, -infinity}, row_sum[2] = {};
  const int steps = (arguments.len_k + kTile - 1) / kTile;
  for (int step = 0; step < steps; ++step) {
    const unsigned buffer = (step & 1) * kTileBytes, next = kTileBytes - buffer;
    copy_async_wait<0>();  // MARK: tiles have landed
    __syncthreads();       // MARK: for every thread, and all have left the other buffer
    if (step + 1 < steps) {
      copy_tile(k_tiles + next, arguments.k + head, arguments.stride_row, (step + 1) * kTile, arguments.len_k);
      copy_tile(v_tiles + next, arguments.v + head, arguments.stride_row, (step + 1) * kTile, arguments.len_k);
      copy_async_commit();
    }
    float scores[4][4] = {};
#pragma unroll
    for (int depth = 0; depth < 2; ++depth) {
      unsigned a[4], b[4];
      load_matrix_x4(a, q_tile + chunk_offset(warp * 16 + lane % 16, depth * 2 + lane / 16));
#pragma unroll
      for (int keys = 0; keys < 2; ++keys) {
        const int key = keys * 16 + lane % 8 + lane / 16 * 8;
        load_matrix_x4(b, k_tiles + buffer + chunk_offset(key, depth * 2 + lane / 8 % 2));
        mma_m16n8k16_f16(scores[2 * keys], a, b[0], b[1]);
        mma_m16n8k16_f16(scores[2 * keys + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = row_max[half];
      for (int i = 0; i < 4; ++i) {
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          const int key = step * kTile + i * 8 + lane % 4 * 2 + j % 2;
          scores[i][j] = key < arguments.len_k ? scores[i][j] * arguments.scale_log2 : -infinity;
          highest = fmaxf(highest, scores[i][j]);
        }
      }
      highest = quad_max(highest);
      const float rescale = exp2_approx(row_max[half] - highest);
      row_max[half] = highest;
      row_sum[half] *= rescale;
      for (int i = 0; i < 4; ++i) {
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          output[i][j] *= rescale;
          scores[i][j] = exp2_approx(scores[i][j] - highest);
          row_sum[half] += scores[i][j];
        }
      }
    }
#pragma unroll
    for (int depth = 0; depth < 2; ++depth) {
      const float(&left)[4] = scores[2 * depth], (&right)[4] = scores[2 * depth + 1];
      const unsigned a[4] = {pack_f16(left[0], left[1]), pack_f16(left[2], left[3]), pack_f16(right[0], right[1]),
                             pack_f16(right[2], right[3])};
      unsigned b[4];
#pragma unroll
      for (int columns = 0; columns < 2; ++columns) {
        load_matrix_x4_transposed(b, v_tiles + buffer + chunk_offset(depth * 16 + lane % 16, columns * 2 + lane / 16));
        mma_m16n8k16_f16(output[2 * columns], a, b[0], b[1]);
        mma_m16n8k16_f16(output[2 * columns + 1], a, b[2], b[3]);
      }
    }
  }
  copy_async_wait<0>();
  for (int half = 0; half < 2; ++half) {
    const float inverse = 1.0f / quad_sum(row_sum[half]);
    const int row = warp * 16 + lane / 4 + half * 8;
    for (int i = 0; i < 4; ++i)  // a warp alone reads its rows of Q: the output takes their place
      *reinterpret_cast<unsigned*>(shared_memory + chunk_offset(row, i) + lane % 4 * 4) =
          pack_f16(output[i][2 * half] * inverse, output[i][2 * half + 1] * inverse);
  }
  __syncwarp();  // MARK: rows are staged
  for (int i = lane; i < 16 * 4; i += 32) {
    const int row = warp * 16 + i / 4, chunk = i % 4;
    if (first_query + row < arguments.len_q)  // MARK: rows that exist
      *reinterpret_cast<uint4*>(arguments.out + head + (first_query + row) * arguments.stride_row + chunk * 8) =
          *reinterpret_cast<const uint4*>(shared_memory + chunk_offset(row, chunk));
  }
}
