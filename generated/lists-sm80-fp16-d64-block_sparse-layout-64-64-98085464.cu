// flashgen: lists of key tiles, fp16-d64-block_sparse-layout-64-64-98085464
//
// mask     block_sparse('layout', 64, 64)
// tiles    128 queries x 64 keys
// Grid: one block per (tile of queries, head, batch) of the lists, in one dimension. Every element of a tile is evaluated.

// Strides are in elements.
struct ListArguments {
  int* counts;
  int* entries;
  const unsigned char* layout;
  long long layout_stride[2];
  int heads;
  int len_q;
  int len_k;
  int layout_size[2];
};

constexpr int kTileQ = 128;
constexpr int kTileK = 64;
constexpr int kThreads = 256;
static_assert(kThreads % kTileK == 0, "a thread stays in its column of the tile");

#ifndef FLASHGEN_EMULATOR   // the emulator brings its own

#endif

// layout[i0][i1], each index clamped to the array.
__device__ __forceinline__ bool load_layout(const ListArguments& arguments, int i0, int i1) {
  i0 = min(max(i0, 0), arguments.layout_size[0] - 1);
  i1 = min(max(i1, 0), arguments.layout_size[1] - 1);
  const long long element = i0 * arguments.layout_stride[0] + i1 * arguments.layout_stride[1];
  return static_cast<bool>(__ldg(arguments.layout + element));
}

// Mask: block_sparse('layout', 64, 64)
__device__ __forceinline__ bool may_attend(int q, int k, const ListArguments& arguments) {
  return load_layout(arguments, q / 64, k / 64);
}

// counts[row] tiles of keys stand in entries[row * tiles_k], ...: tile << 1 | every score of the tile counts.
extern "C" __global__ void __launch_bounds__(kThreads)
list_key_tiles_fp16_d64_block_sparse_layout_64_64_98085464(const __grid_constant__ ListArguments arguments) {
  const int tiles_q = (arguments.len_q + kTileQ - 1) / kTileQ, tiles_k = (arguments.len_k + kTileK - 1) / kTileK;
  const int first_query = blockIdx.x % tiles_q * kTileQ, end_query = min(first_query + kTileQ, arguments.len_q);
  int* entries = arguments.entries + static_cast<long long>(blockIdx.x) * tiles_k;
  int count = 0;
  for (int tile = 0; tile < tiles_k; ++tile) {
    const int k = tile * kTileK + threadIdx.x % kTileK;
    bool any = false, all = (tile + 1) * kTileK <= arguments.len_k;
    for (int q = first_query + threadIdx.x / kTileK; k < arguments.len_k && q < end_query; q += kThreads / kTileK) {
      const bool attends = may_attend(q, k, arguments);
      any |= attends;
      all &= attends;
    }
    const bool visited = __syncthreads_or(any), full = __syncthreads_and(all);
    if (visited && threadIdx.x == 0) entries[count] = tile << 1 | full;
    count += visited;
  }
  if (threadIdx.x == 0) arguments.counts[blockIdx.x] = count;
}
