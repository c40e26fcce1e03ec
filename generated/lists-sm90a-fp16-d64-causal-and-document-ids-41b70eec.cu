// flashgen: key tiles of each query tile, fp16-d64-causal-and-document-ids-41b70eec
//
// mask     causal() & document('ids')
// tiles    128 queries x 128 keys
//
// Grid: (query tiles, 1, 1); a block makes one list. Each warp takes 8 key tiles at a time.
// What the mask is over a whole tile is worked out from the ranges of its indices; where these leave it open, the warp
// looks at the elements.

struct ListArguments {
  int* counts;
  long long* offsets;
  int* entries;
  const int* ids;
  long long ids_stride[1];
  int len_q;
  int len_k;
  int spacing;   // entries from list to list; 0 where `offsets` says
  int ids_size[1];
};

constexpr int kTileQ = 128;
constexpr int kTileK = 128;
constexpr int kWarps = 16;
constexpr int kTilesPerWarp = 8;   // at a time
constexpr int kStepsPerVote = 8;    // elements that a lane looks at before the warp asks whether it has seen enough
constexpr int kMostScanned = 256;   // elements of an array whose extremes are looked for
static_assert(kTileQ * kTileK % (32 * kStepsPerVote) == 0, "every lane looks at as many elements");

#ifndef FLASHGEN_EMULATOR   // the emulator brings its own

extern __shared__ __align__(1024) unsigned char shared_memory[];

// a * b in 64 bits, by one instruction: of widened operands the compiler may make four.
__device__ __forceinline__ long long wide_product(int a, int b) {
  long long product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

#endif

// ids[i0], each index, 0 or more, clamped to the array; strides are in bytes.
__device__ __forceinline__ int load_ids(const ListArguments& arguments, int i0) {
  i0 = min(static_cast<unsigned>(i0), arguments.ids_size[0] - 1u);
  const char* element = reinterpret_cast<const char*>(arguments.ids);
  element += wide_product(i0, static_cast<int>(arguments.ids_stride[0]));
  return static_cast<int>(__ldg(reinterpret_cast<const int*>(element)));
}

// Mask: causal() & document('ids')
__device__ __forceinline__ bool mask_mod(int q, int k, const ListArguments& arguments) {
  return (k <= q + (arguments.len_k - arguments.len_q)) & (load_ids(arguments, q) == load_ids(arguments, k));
}

// The values of an integer over a tile, both ends included; a number is a range of one value.
struct Range {
  int low, high;

  __device__ __forceinline__ Range(int value) : low(value), high(value) {}
  __device__ __forceinline__ Range(int low, int high) : low(low), high(high) {}
  // All that the mask computes is proven to fit in 32 bits, so nothing is lost by clamping to them.
  __device__ __forceinline__ Range(long long low, long long high)
      : low(static_cast<int>(min(max(low, -2147483648ll), 2147483647ll))),
        high(static_cast<int>(min(max(high, -2147483648ll), 2147483647ll))) {}
};

// Whether a condition holds over a tile: for every element, for none, or, where both are false, unknown.
struct Truth {
  bool always, never;

  __device__ __forceinline__ Truth(bool value) : always(value), never(!value) {}
  __device__ __forceinline__ Truth(bool always, bool never) : always(always), never(never) {}
};

__device__ __forceinline__ Range operator+(Range a, Range b) { return {0ll + a.low + b.low, 0ll + a.high + b.high}; }
__device__ __forceinline__ Truth operator==(Range a, Range b) {
  return {a.low == a.high && b.low == b.high && a.low == b.low, a.high < b.low || b.high < a.low};
}
__device__ __forceinline__ Truth operator<=(Range a, Range b) { return {a.high <= b.low, a.low > b.high}; }
__device__ __forceinline__ Truth operator&(Truth a, Truth b) { return {a.always && b.always, a.never || b.never}; }

// ids over ranges of indices: its elements are looked at, unless they are many.
__device__ __forceinline__ Range load_ids(const ListArguments& arguments, Range i0) {
  const int low0 = max(min(i0.low, arguments.ids_size[0] - 1), 0);
  const int high0 = max(min(i0.high, arguments.ids_size[0] - 1), 0);
  const float elements = (high0 - low0 + 1.0f);
  if (elements > kMostScanned) return {-2147483647 - 1, 2147483647};
  int least = 2147483647, greatest = -least - 1;
  for (int e0 = low0; e0 <= high0; ++e0) {
    const int value = load_ids(arguments, e0);
    least = min(least, value);
    greatest = max(greatest, value);
  }
  return {least, greatest};
}

// The mask over a tile: its own expression, of ranges.
__device__ __forceinline__ Truth mask_mod_within(Range q, Range k, const ListArguments& arguments) {
  return (k <= q + (arguments.len_k - arguments.len_q)) & (load_ids(arguments, q) == load_ids(arguments, k));
}

// The mask over a tile by its elements, of which a warp looks at so many that one is true and one is false.
__device__ __forceinline__ Truth look_at_elements(int first_q, int first_k, const ListArguments& arguments) {
  bool some = false, every = true;
  for (int first = threadIdx.x % 32; first < kTileQ * kTileK; first += 32 * kStepsPerVote) {
#pragma unroll
    for (int element = first; element < first + 32 * kStepsPerVote; element += 32) {
      // Where a tile overhangs, its last query or key stands for those that are missing.
      const int q = min(first_q + element / kTileK, arguments.len_q - 1);
      const int k = min(first_k + element % kTileK, arguments.len_k - 1);
      const bool attends = mask_mod(q, k, arguments);
      some |= attends;
      every &= attends;
    }
    some = __any_sync(0xffffffffu, some);
    every = __all_sync(0xffffffffu, every);
    if (some && !every) break;
  }
  return {every, !some};
}

// One bit for each tile of a warp.
struct Classes {
  unsigned visited, full;
};

// The classes of the key tiles from first_tile on. A tile with keys beyond len_k is never full.
__device__ __forceinline__ Classes classify(int q_tile, int first_tile, int end_tile, const ListArguments& arguments) {
  const int slot = threadIdx.x % kTilesPerWarp, k_tile = first_tile + slot;
  const bool exists = k_tile < end_tile && threadIdx.x % 32 < kTilesPerWarp;
  const unsigned whole = __ballot_sync(0xffffffffu, (k_tile + 1) * kTileK <= arguments.len_k);
  Truth truth(false);
  if (exists) {
    const Range q(q_tile * kTileQ, min((q_tile + 1) * kTileQ, arguments.len_q) - 1);
    const Range k(k_tile * kTileK, min((k_tile + 1) * kTileK, arguments.len_k) - 1);
    truth = mask_mod_within(q, k, arguments);
  }
  Classes classes = {__ballot_sync(0xffffffffu, !truth.never), __ballot_sync(0xffffffffu, truth.always) & whole};
  unsigned open = __ballot_sync(0xffffffffu, !truth.never && !truth.always);
  for (; open; open &= open - 1) {
    const int tile = __ffs(open) - 1;
    const Truth seen = look_at_elements(q_tile * kTileQ, (first_tile + tile) * kTileK, arguments);
    if (seen.never) classes.visited &= ~(1u << tile);
    if (seen.always) classes.full |= 1u << tile & whole;
  }
  return classes;
}

// counts[list] key tiles stand in entries from offsets[list] on, in order: tile << 1 | every element counts.
// With `spacing` the lists begin at multiples of it, and the kernel writes the offsets; without `entries` it counts.
// One block a multiprocessor will do: for the sake of more the assembler would spill what ranges need.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
list_key_tiles_fp16_d64_causal_and_document_ids_41b70eec(const __grid_constant__ ListArguments arguments) {
  const int q_tile = blockIdx.x;
  const int list = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int q_last = min((q_tile + 1) * kTileQ, arguments.len_q) - 1;
  // Nothing before `begin` or from `end` on is attended to, by the parts of the mask of which that can be said beforehand.
  const int begin = 0;
  const int end = min(arguments.len_k, q_last + arguments.len_k - arguments.len_q + 1);
  const int begin_tile = begin / kTileK;
  const int end_tile = end > begin ? (end + kTileK - 1) / kTileK : begin_tile;

  long long offset = static_cast<long long>(list) * arguments.spacing;
  if (arguments.spacing == 0) {
    offset = arguments.offsets[list];
  } else if (threadIdx.x == 0) {
    arguments.offsets[list] = offset;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned* visited_by_warp = reinterpret_cast<unsigned*>(shared_memory);
  int count = 0;
  for (int section = begin_tile; section < end_tile; section += kWarps * kTilesPerWarp) {
    const int first_tile = section + warp * kTilesPerWarp;
    const Classes classes = classify(q_tile, first_tile, end_tile, arguments);
    if (lane == 0) visited_by_warp[warp] = classes.visited;
    __syncthreads();
    // Behind the tiles of the warps before, and of the lanes before.
    int position = count + __popc(classes.visited & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      const int visited = __popc(visited_by_warp[other]);
      count += visited;
      if (other < warp) position += visited;
    }
    if (arguments.entries && classes.visited >> lane & 1) {
      arguments.entries[offset + position] = (first_tile + lane) << 1 | (classes.full >> lane & 1);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) arguments.counts[list] = count;
}
