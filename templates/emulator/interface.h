// The part of the runtime that a kernel's unit sees: the running CUDA thread, and the operations that wait, check or
// access shared memory. Each takes the Site of its caller as a default argument, so that findings name a line of the
// emitted source.
#pragma once

namespace emulator {

using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

// A line of the emitted source. As a default argument, here() is evaluated where the primitive is called.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};
#define FLASHGEN_SITE ::emulator::Site site = ::emulator::Site::here()

// The running CUDA thread as the kernel sees it. The runtime's Thread (block.h) extends it.
struct ThreadContext {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
  u32 linear, warp, lane;  // linear: x fastest, then y, then z, as CUDA numbers them
  unsigned char* shared;   // the block's dynamic shared memory
  u32 shared_bytes;
  u32 exponentials;        // computed by the thread so far
};

// Initial-exec, since kernels read it for every threadIdx, and the library that defines it has no other TLS variable.
extern __thread ThreadContext* current __attribute__((tls_model("initial-exec")));

inline unsigned char* dynamic_shared_memory() { return current->shared; }

// Ends the launch with an error at `site`. The block is abandoned, and no other block starts.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Site site, const char* format, ...);

// ---- shared memory (shared_memory.cpp) ----
u32 shared_address(const void* pointer, Site site);                      // generic pointer -> shared address
void* shared_pointer(u32 address, u32 bytes, u32 alignment, Site site);  // the inverse, checked

// ---- warps (lane_exchange.cpp, warp_collectives.cpp) ----
u64 shuffle_bits(u32 mask, u64 bits, u32 source_lane, Site site);
u32 ballot(u32 mask, bool predicate, Site site);
void sync_warp(u32 mask, Site site);
bool elect(Site site);

// ---- blocks (block_barriers.cpp) ----
enum class BarrierKind : int { kSync, kOr, kAnd, kCount };
int block_barrier(int identifier, BarrierKind kind, int predicate, Site site);
void named_barrier(u32 id, u32 threads, bool waits, Site site);  // named_barriers.cpp
void memory_fence();

// ---- clusters (clusters.cpp); a remote address is that of the same memory in another block of the cluster ----
u32 remote_address(u32 address, u32 rank, Site site);
void cluster_barrier(Site site);
void remote_arrive(u32 barrier, Site site);
void remote_store(u32 destination, const u32* words, u32 barrier, Site site);  // 16 bytes

// ---- asynchronous copies (async_copies.cpp) ----
void copy_async(u32 shared_destination, const void* global_source, u32 bytes, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(int pending);
void copy_sync(u32 shared_destination, const void* global_source, u32 bytes, bool valid, Site site);

// ---- mbarriers (mbarriers.cpp); `barrier` is a shared address ----
void mbarrier_init(u32 barrier, u32 arrivals, Site site);
void mbarrier_fence_init();
void mbarrier_arrive_expect_bytes(u32 barrier, u32 bytes, Site site);
void mbarrier_arrive(u32 barrier, Site site);
void mbarrier_wait(u32 barrier, u32 parity, Site site);

// ---- TMA (tensor_copies.cpp); `map` is from flashgen/runtime/tensor_maps.py, `start` are coordinates ----
void tensor_load(u32 destination, const void* map, u32 barrier, int rank, const int* start, Site site);
void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, Site site);
void tensor_store(const void* map, u32 source, int rank, const int* start, bool add, Site site);
void bulk_reduce_add(float* sums, u32 source, u32 bytes, Site site);
void bulk_store(void* destination, u32 source, u32 bytes, Site site);
void bulk_commit();
void bulk_wait_read(int pending);
void fence_async_shared();  // async_proxy.cpp

// ---- semaphores and counters in global memory (semaphores.cpp) ----
void semaphore_wait(const u32* semaphore, u32 value, Site site);
bool semaphore_test(const u32* semaphore, u32 value);
void semaphore_release(u32* semaphore, u32 value, Site site);
void counter_add(u32* counter, u32 amount);
void counter_wait(const u32* counter, u32 target, Site site);

// ---- matrices (matrix.cpp) ----
enum class Element : int { kf16, kbf16 };  // spelled as in PTX and in the names of primitives
void load_matrix(u32* fragment, int count, bool transposed, u32 shared_source, Site site);
void store_matrix(u32 shared_destination, const u32* fragment, int count, bool transposed, Site site);
// d += a * b on fragments of m16n8k16. Partial sums are rounded to float after every `depth` steps of k.
void multiply_accumulate(float* d, const u32* a, u32 b0, u32 b1, Element element, int depth, Site site);

// ---- warpgroups (wgmma.cpp, register_budget.cpp) ----
// d (64 x columns) = a (64 x 16) * b (16 x columns), plus d if `accumulate`.
struct WarpgroupProduct {
  int columns;
  Element element;
  bool transposed_b, accumulate;
  const u32* a_registers;  // null if a is in shared memory
  u64 a, b;                // descriptors
};
void wgmma(float* d, const WarpgroupProduct& what, Site site);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending, Site site);
void set_registers(u32 count, bool increase, Site site);

// ---- recorded actions of warps (timeline.cpp) ----
// Keep in step with flashgen/runtime/timeline.py.
enum class Did : u32 {
  kCopy, kCommitCopies, kAwaitCopies,              // cp.async: amount is bytes of a lane, or groups left pending
  kLoad, kStore,                                   // TMA: object is the mbarrier; amount is bytes
  kMultiply,                                       // mma: amount is the number of 16 x 8 x 16 products
  kMultiplyAsync, kCommitProducts, kAwaitProducts, // wgmma: amount is the columns of a product, or groups pending
  kArrive, kAwaitPhase,                            // mbarriers: object, phase
  kReach, kLeave,                                  // barriers of a block: object is the number, amount the threads
};

struct TimelineEvent {
  u32 warp, did, line;
  u32 exponentials;  // computed by lane 0 so far
  u32 object, phase, amount;
};

// Counts an exponential of the running thread. The count is in memory of the runtime, which sanitizers do not check.
void count_exponential();

// ---- launch (launch.cpp) ----
// Keep in step with flashgen/runtime/emulator.py (ctypes).
struct LaunchRequest {
  u32 grid[3], block[3];
  u32 shared_bytes;
  u32 argument_bytes;
  const void* arguments;
  u32 order, copies, workers;
  u32 failed;
  u64 seed;
  u64 blocks, switches, collectives, async_copies;  // results
  TimelineEvent* events;                            // null to record nothing
  u64 event_capacity, event_count;                  // the count may exceed the capacity
  char message[8192];                               // result: the error, if failed
};

using KernelThread = void (*)(const void* arguments);
int launch(LaunchRequest* request, KernelThread run_thread, u32 cluster_blocks);
int refuse_arguments(LaunchRequest* request, u32 expected_bytes);
int run_request_file(int argc, char** argv, int (*launch_kernel)(LaunchRequest*));

// Takes the type of the argument struct from the kernel, so that its size can be checked against the bytes passed.
template <class Arguments>
int launch_kernel(void (*)(Arguments), LaunchRequest* request, KernelThread run_thread, u32 cluster_blocks) {
  if (request->argument_bytes != sizeof(Arguments)) return refuse_arguments(request, sizeof(Arguments));
  return launch(request, run_thread, cluster_blocks);
}

template <class Arguments>
void call_kernel(void (*kernel)(Arguments), const void* arguments) {
  kernel(*static_cast<const Arguments*>(arguments));
}

}  // namespace emulator
