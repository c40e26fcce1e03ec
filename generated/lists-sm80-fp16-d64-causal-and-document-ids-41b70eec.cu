// flashgen: lists of key tiles, fp16-d64-causal-and-document-ids-41b70eec
//
// mask     causal() & document('ids')
// tiles    128 queries x 64 keys
// Grid: one block per (tile of queries, head, batch) of the lists, in one dimension. Every element of a tile is evaluated.

// Strides are in elements.
struct ListArguments {
  int* counts;
  int* entries;
  const int* ids;
  long long ids_stride[1];
  int heads;
  int len_q;
  int len_k;
  int ids_size[1];
};

constexpr int kTileQ = 128;
constexpr int kTileK = 64;
constexpr int kThreads = 256;
static_assert(kThreads % kTileK == 0, "a thread stays in its column of the tile");

#ifndef FLASHGEN_EMULATOR   // the emulator brings its own

#endif

// ids[i0], each index clamped to the array.
__device__ __forceinline__ int load_ids(const ListArguments& arguments, int i0) {
  i0 = min(max(i0, 0), arguments.ids_size[0] - 1);
  const long long element = i0 * arguments.ids_stride[0];
  return static_cast<int>(__ldg(arguments.ids + element));
}

// Mask: causal() & document('ids')
__device__ __forceinline__ bool may_attend(int q, int k, const ListArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q) && load_ids(arguments, q) == load_ids(arguments, k);
}

// counts[row] tiles of keys stand in entries[row * tiles_k], ...: tile << 1 | every score of the tile counts.
extern "C" __global__ void __launch_bounds__(kThreads)
list_key_tiles_fp16_d64_causal_and_document_ids_41b70eec(const __grid_constant__ ListArguments arguments) {
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
