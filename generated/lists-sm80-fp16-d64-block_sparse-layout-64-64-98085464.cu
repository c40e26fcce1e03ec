// flashgen: lists of the key tiles that each query tile visits, fp16-d64-block_sparse-layout-64-64-98085464
//
// mask     block_sparse('layout', 64, 64)
// tiles    128 queries x 32 keys
//
// Grid: (query tiles, 1, 1). A CTA writes one list. Each of its warps classifies 8 key tiles at a time.
// Interval arithmetic evaluates the mask over a whole tile. If the result is undecided, the warp evaluates the
// elements.

struct ListArguments {
  int* counts;
  long long* offsets;
  int* entries;
  const unsigned char* layout;
  long long layout_stride[2];
  int len_q;
  int len_k;
  int spacing;   // entries from list to list, or 0 if `offsets` is given
  int layout_size[2];
};

constexpr int kTileQ = 128;
constexpr int kTileK = 32;
constexpr int kWarps = 16;
constexpr int kTilesPerWarp = 8;   // at a time
constexpr int kStepsPerVote = 8;   // elements that each lane evaluates between two votes of the warp
constexpr int kMaxScanned = 256;   // maximum elements of an array that are searched for their minimum and maximum
static_assert(kTileQ * kTileK % (32 * kStepsPerVote) == 0, "all lanes evaluate equally many elements");

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Returns a * b in 64 bits with one instruction. From widened operands the compiler may make four.
__device__ __forceinline__ long long wide_product(int a, int b) {
  long long product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

#endif

// Returns floor(a / b) as Python's a // b does, or 0 if b is 0.
__device__ __forceinline__ int floor_divide(int a, int b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<int>(0u - static_cast<unsigned>(a));   // CPUs trap on the smallest int / -1
  const int quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

// Returns layout[i0][i1]. Indices must not be negative and are clamped to the array. Strides are in bytes.
__device__ __forceinline__ bool load_layout(const ListArguments& arguments, int i0, int i1) {
  i0 = min(static_cast<unsigned>(i0), arguments.layout_size[0] - 1u);
  i1 = min(static_cast<unsigned>(i1), arguments.layout_size[1] - 1u);
  const char* element = reinterpret_cast<const char*>(arguments.layout);
  element += i0 * arguments.layout_stride[0];
  element += wide_product(i1, static_cast<int>(arguments.layout_stride[1]));
  return static_cast<bool>(__ldg(reinterpret_cast<const unsigned char*>(element)));
}

// Mask block_sparse('layout', 64, 64): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const ListArguments& arguments) {
  return load_layout(arguments, q >> 6, k >> 6);
}

// The range of an integer over a tile, bounds included. A number converts to a range of one value.
struct Range {
  int low, high;

  __device__ __forceinline__ Range(int value) : low(value), high(value) {}
  __device__ __forceinline__ Range(int low, int high) : low(low), high(high) {}
  // All values of the mask's integers are proven to fit in 32 bits, so that clamping the bounds loses nothing.
  __device__ __forceinline__ Range(long long low, long long high)
      : low(static_cast<int>(min(max(low, -2147483648ll), 2147483647ll))),
        high(static_cast<int>(min(max(high, -2147483648ll), 2147483647ll))) {}
};

// Whether a condition holds over a tile: for every element (`always`), for none (`never`), or unknown if both are
// false.
struct Truth {
  bool always, never;

  __device__ __forceinline__ Truth(bool value) : always(value), never(!value) {}
  __device__ __forceinline__ Truth(bool always, bool never) : always(always), never(never) {}
};

// Divides by a positive constant. Floor division is monotonic in the dividend.
__device__ __forceinline__ Range quotient(Range a, int divisor) {
  return {floor_divide(a.low, divisor), floor_divide(a.high, divisor)};
}

// Returns the range of layout over ranges of indices by reading its elements, unless there are too many of them.
__device__ __forceinline__ Truth load_layout(const ListArguments& arguments, Range i0, Range i1) {
  const int low0 = max(min(i0.low, arguments.layout_size[0] - 1), 0);
  const int high0 = max(min(i0.high, arguments.layout_size[0] - 1), 0);
  const int low1 = max(min(i1.low, arguments.layout_size[1] - 1), 0);
  const int high1 = max(min(i1.high, arguments.layout_size[1] - 1), 0);
  const float elements = (high0 - low0 + 1.0f) * (high1 - low1 + 1.0f);
  if (elements > kMaxScanned) return {false, false};
  bool some = false, every = true;
  for (int e0 = low0; e0 <= high0; ++e0) {
    for (int e1 = low1; e1 <= high1; ++e1) {
      const bool value = load_layout(arguments, e0, e1);
      some |= value;
      every &= value;
    }
  }
  return {every, !some};
}

// Evaluates the mask over a whole tile: its expression over ranges instead of integers.
__device__ __forceinline__ Truth mask_mod_over_tile(Range q, Range k, const ListArguments& arguments) {
  return load_layout(arguments, quotient(q, 64), quotient(k, 64));
}

// Evaluates the mask over a tile by its elements. The warp stops as soon as it has found both true and false elements.
__device__ __forceinline__ Truth evaluate_elements(int first_q, int first_k, const ListArguments& arguments) {
  bool some = false, every = true;
  for (int first = threadIdx.x % 32; first < kTileQ * kTileK; first += 32 * kStepsPerVote) {
#pragma unroll
    for (int element = first; element < first + 32 * kStepsPerVote; element += 32) {
      // Elements beyond the last query or key repeat that one.
      const int q = min(first_q + element / kTileK, arguments.len_q - 1);
      const int k = min(first_k + element % kTileK, arguments.len_k - 1);
      const bool allowed = mask_mod(q, k, arguments);
      some |= allowed;
      every &= allowed;
    }
    some = __any_sync(0xffffffffu, some);
    every = __all_sync(0xffffffffu, every);
    if (some && !every) break;
  }
  return {every, !some};
}

// The classes of a warp's tiles, one bit per tile.
struct Classes {
  unsigned visited, full;
};

// Classifies kTilesPerWarp key tiles from first_tile on. A tile with keys beyond len_k is never full.
__device__ __forceinline__ Classes classify(int q_tile, int first_tile, int end_tile, const ListArguments& arguments) {
  const int slot = threadIdx.x % kTilesPerWarp, k_tile = first_tile + slot;
  const bool exists = k_tile < end_tile && threadIdx.x % 32 < kTilesPerWarp;
  const unsigned inside = __ballot_sync(0xffffffffu, (k_tile + 1) * kTileK <= arguments.len_k);
  Truth truth(false);
  if (exists) {
    const Range q(q_tile * kTileQ, min((q_tile + 1) * kTileQ, arguments.len_q) - 1);
    const Range k(k_tile * kTileK, min((k_tile + 1) * kTileK, arguments.len_k) - 1);
    truth = mask_mod_over_tile(q, k, arguments);
  }
  Classes classes = {__ballot_sync(0xffffffffu, !truth.never), __ballot_sync(0xffffffffu, truth.always) & inside};
  unsigned undecided = __ballot_sync(0xffffffffu, !truth.never && !truth.always);
  for (; undecided; undecided &= undecided - 1) {
    const int tile = __ffs(undecided) - 1;
    const Truth exact = evaluate_elements(q_tile * kTileQ, (first_tile + tile) * kTileK, arguments);
    if (exact.never) classes.visited &= ~(1u << tile);
    if (exact.always) classes.full |= 1u << tile & inside;
  }
  return classes;
}

// Writes a list: counts[list] key tiles in ascending order, from entries[offsets[list]] on. An entry is tile << 1, plus
// 1 if the tile is full. If `spacing` is not 0, lists begin at its multiples and the kernel writes the offsets. If
// `entries` is null, the kernel only counts. One CTA per multiprocessor suffices, and more would make the registers
// spill.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
list_key_tiles_fp16_d64_block_sparse_layout_64_64_98085464(const __grid_constant__ ListArguments arguments) {
  const int q_tile = blockIdx.x;
  const int list = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int begin_tile = 0, end_tile = (arguments.len_k + kTileK - 1) / kTileK;

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
    // A tile is stored after those of earlier warps and of earlier lanes of this warp.
    int index = count + __popc(classes.visited & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      const int visited = __popc(visited_by_warp[other]);
      count += visited;
      if (other < warp) index += visited;
    }
    if (arguments.entries && classes.visited >> lane & 1) {
      arguments.entries[offset + index] = (first_tile + lane) << 1 | (classes.full >> lane & 1);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) arguments.counts[list] = count;
}
