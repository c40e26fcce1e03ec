// Launches a grid: clusters of blocks one after the other, or spread over operating-system threads ("workers"). Blocks of
// a kernel without clusters are clusters of one block.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "block.h"

namespace emulator {

// Large, since kernels keep fragments on the stack and sanitizers pad every variable. Untouched pages cost nothing.
constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kSharedAlignment = 1024;

static u32 threads_of(const LaunchRequest& request) { return request.block[0] * request.block[1] * request.block[2]; }
static u64 blocks_of(const LaunchRequest& request) { return u64(request.grid[0]) * request.grid[1] * request.grid[2]; }

// Allocates exactly `bytes` for each block, so that ASan's red zone follows directly. ThreadSanitizer remembers
// accesses by address; a new mapping makes it forget those of the previous block, whose shared memory is unrelated.
static unsigned char* allocate_shared(u32 bytes) {
  void* memory = nullptr;
  if (kThreadSanitizer) {
    memory = mmap(nullptr, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
  } else if (posix_memalign(&memory, kSharedAlignment, bytes) != 0) {
    abort();
  }
  memset(memory, 0xff, bytes);  // NaN in every float format
  return static_cast<unsigned char*>(memory);
}

static void free_shared(unsigned char* memory, u32 bytes) {
  if (kThreadSanitizer)
    munmap(memory, bytes + 1);
  else
    free(memory);
}

// Runs clusters of blocks, one at a time. Its operating-system thread keeps it between launches to reuse the stacks.
class Worker {
 public:
  ~Worker() {
    for (Carrier& carrier : carriers_) free_stack(carrier.fiber);
  }

  // Returns false if there is no memory for the stacks.
  bool begin(LaunchRequest& request, KernelThread run_thread, u32 cluster_blocks);
  void run(u64 number);
  const std::deque<Block>& blocks() const { return blocks_; }

 private:
  bool add_carriers(u32 count);
  void begin_block(Block& block, LaunchRequest& request, KernelThread run_thread);
  void reset_block(Block& block, u64 number);
  void reset_engines(Block& block);
  void place_thread(Block& block, u32 linear, u64 block_number);
  void end_abandoned_threads(Block& block);

  std::deque<Carrier> carriers_;
  std::deque<Block> blocks_;
  Cluster cluster_;
};

bool Worker::add_carriers(u32 count) {
  while (carriers_.size() < count) {
    Carrier& carrier = carriers_.emplace_back();
    if (!allocate_stack(carrier.fiber, kStackBytes)) {
      carriers_.pop_back();
      return false;
    }
#ifdef FLASHGEN_TSAN
    char name[32];
    snprintf(name, sizeof name, "CUDA thread (carrier %zu)", carriers_.size() - 1);
    carrier.fiber.tsan = __tsan_create_fiber(0);
    __tsan_set_fiber_name(carrier.fiber.tsan, name);
#endif
  }
  return true;
}

bool Worker::begin(LaunchRequest& request, KernelThread run_thread, u32 cluster_blocks) {
  if (!add_carriers(threads_of(request) * cluster_blocks)) return false;
  while (blocks_.size() < cluster_blocks) blocks_.emplace_back();
  while (blocks_.size() > cluster_blocks) blocks_.pop_back();
  cluster_.blocks.clear();
  for (Block& block : blocks_) {
    block.cluster = &cluster_;
    block.rank = u32(cluster_.blocks.size());
    cluster_.blocks.push_back(&block);
    begin_block(block, request, run_thread);
  }
  cluster_.waiting.clear();
  cluster_.waiting.reserve(threads_of(request) * cluster_blocks);  // see ReadyQueue::reset
  adopt_running_stack(blocks_[0].worker);
  return true;
}

void Worker::begin_block(Block& block, LaunchRequest& request, KernelThread run_thread) {
  u32 threads = threads_of(request), warps = (threads + 31) / 32;
  block.request = &request;
  block.run_thread = run_thread;
  block.failed = false;
  block.switches = block.collectives = block.async_copies = 0;
  block.threads.resize(threads);
  block.warps.resize(warps);
  block.warpgroups.resize((warps + kWarpgroupWarps - 1) / kWarpgroupWarps);
  for (Barrier& barrier : block.barriers) {
    barrier.waiting.clear();
    barrier.waiting.reserve(threads);  // see ReadyQueue::reset
  }
}

// Threads of consecutive blocks run on shifted carriers. To ThreadSanitizer a carrier is a thread, so that the blocks
// of a grid are unordered as on a GPU, and races between them are found although they run one after another. This holds
// up to the first barrier of a block. After it blocks appear ordered, since they share the object that represents a
// barrier to ThreadSanitizer. Tests of the emitted text cover races between blocks after barriers.
void Worker::place_thread(Block& block, u32 linear, u64 block_number) {
  const u32 *size = block.request->block, *grid = block.request->grid;
  u32 threads = u32(block.threads.size());
  Thread& thread = block.threads[linear];
  thread.thread_index = {linear % size[0], linear / size[0] % size[1], linear / size[0] / size[1]};
  thread.block_index = block.index;
  thread.block_size = {size[0], size[1], size[2]};
  thread.grid_size = {grid[0], grid[1], grid[2]};
  thread.linear = linear;
  thread.warp = linear / 32;
  thread.lane = linear % 32;
  thread.shared = block.shared;
  thread.shared_bytes = block.request->shared_bytes;
  thread.exponentials = 0;
  thread.carrier = &carriers_[block.rank * threads + (linear + block_number * 37) % threads];
  thread.block = &block;
  thread.in_warp = &block.warps[linear / 32];
  thread.in_warp->live |= 1u << thread.lane;
  thread.copies.reset();
  thread.bulk.stores.clear();
  thread.bulk.open_group = 0;
  thread.matrix = WarpgroupMember{};
}

void Worker::reset_engines(Block& block) {
  block.async_proxy.reset(block.shared, block.request->shared_bytes);
  block.mbarriers.clear();
  block.mbarrier_pool.give_all_back();
  block.tensor_copies.reset();
  for (Warpgroup& group : block.warpgroups) {
    group.products.clear();
    group.accumulators.clear();
    group.first_product = 0;
  }
  block.product_pool.give_all_back();
  block.accumulator_pool.give_all_back();
  block.products_in_flight = 0;
  block.remote_stores.clear();
  block.remote_store_pool.give_all_back();
  block.blamed = nullptr;
  reset_registers(block);
}

void Worker::reset_block(Block& block, u64 number) {
  LaunchRequest& request = *block.request;
  u32 x = request.grid[0], y = request.grid[1];
  block.index = {u32(number % x), u32(number / x % y), u32(number / x / y)};
  block.random.seed(request.seed * 0x100000001b3ull + number);
  block.shared = allocate_shared(request.shared_bytes);
  block.alive = u32(block.threads.size());
  cluster_.alive += block.alive;
  block.copies_in_flight = 0;
  for (size_t i = 0; i < block.warps.size(); ++i) {
    block.warps[i] = Warp{};
    block.warps[i].first = &block.threads[32 * i];
  }
  for (Barrier& barrier : block.barriers) {
    barrier.arrived = barrier.votes = 0;
    barrier.waiting.clear();
    barrier.warps.assign(block.warps.size(), WarpArrival{});
  }
  reset_engines(block);
  block.ready.reset(Order(request.order), block.alive, u32(block.warps.size()));
  block.polling.clear();
  for (u32 i = 0; i < block.alive; ++i) place_thread(block, i, number);
}

// Runs the cluster of this number, whose blocks follow each other along x.
void Worker::run(u64 number) {
  cluster_.alive = cluster_.arrived = 0;
  cluster_.executing = nullptr;
  cluster_.waiting.clear();
  for (Block& block : blocks_) reset_block(block, number * blocks_.size() + block.rank);
  run_cluster(cluster_);
  for (Block& block : blocks_) {
    if (blocks_[0].failed) end_abandoned_threads(block);
    free_shared(block.shared, block.request->shared_bytes);
  }
}

// Ends threads that never reach their own end. Otherwise ThreadSanitizer reports races with later users of their
// memory.
void Worker::end_abandoned_threads(Block& block) {
  for (Thread& thread : block.threads) {
    AsEngine identity(Engine{thread.carrier->fiber.tsan});
    release(block.request);
  }
  acquire(block.request);
}

// Returns the order of the clusters, which corresponds to that of the threads.
static std::vector<u64> cluster_order(const LaunchRequest& request, u32 cluster_blocks) {
  std::vector<u64> order(blocks_of(request) / cluster_blocks);
  for (u64 i = 0; i < order.size(); ++i) order[i] = i;
  if (Order(request.order) == Order::kReverse) std::reverse(order.begin(), order.end());
  if (Order(request.order) == Order::kRandom || Order(request.order) == Order::kGreedyWarp) {
    Random random;
    random.seed(request.seed);
    for (u64 i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(u32(i))]);
  }
  return order;
}

// Distributes clusters to workers and collects their results.
class Grid {
 public:
  Grid(LaunchRequest& request, KernelThread run_thread, u32 cluster_blocks)
      : request_(request),
        run_thread_(run_thread),
        cluster_blocks_(cluster_blocks),
        order_(cluster_order(request, cluster_blocks)) {}

  void work() {
    static thread_local std::unique_ptr<Worker> worker;
    if (!worker) worker = std::make_unique<Worker>();
    if (!worker->begin(request_, run_thread_, cluster_blocks_)) return report("no memory for the stacks of a block's threads");
    for (u64 i = next_++; i < order_.size() && !stop_; i = next_++) {
      worker->run(order_[i]);
      if (worker->blocks()[0].failed) break;
    }
    for (const Block& block : worker->blocks()) collect(block);
  }

 private:
  void collect(const Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    request_.switches += block.switches;
    request_.collectives += block.collectives;
    request_.async_copies += block.async_copies;
    if (block.failed) fail_once(block.message);
  }

  void report(const char* message) {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_once(message);
  }

  void fail_once(const char* message) {
    stop_ = true;
    if (request_.failed) return;
    request_.failed = 1;
    snprintf(request_.message, sizeof request_.message, "%s", message);
  }

  LaunchRequest& request_;
  KernelThread run_thread_;
  u32 cluster_blocks_;
  std::vector<u64> order_;
  std::atomic<u64> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
};

static int refuse(LaunchRequest& request, const char* format, u64 given, u64 limit) {
  request.failed = 1;
  snprintf(request.message, sizeof request.message, format, given, limit);
  return 1;
}

int refuse_arguments(LaunchRequest* request, u32 expected_bytes) {
  return refuse(*request, "arguments: %llu bytes were passed, but the kernel's argument struct has %llu",
                request->argument_bytes, expected_bytes);
}

// Refuses sizes that every GPU refuses.
static int check_sizes(LaunchRequest& request) {
  constexpr u32 kMaxThreads = 1024, kMaxGridYZ = 65535;
  for (int i = 0; i < 3; ++i) {
    if (request.block[i] == 0) return refuse(request, "block: a dimension is %llu; it must be at least %llu", 0, 1);
    if (request.grid[i] == 0) return refuse(request, "grid: a dimension is %llu; it must be at least %llu", 0, 1);
  }
  if (threads_of(request) > kMaxThreads)
    return refuse(request, "block: %llu threads; at most %llu are possible", threads_of(request), kMaxThreads);
  if (std::max(request.grid[1], request.grid[2]) > kMaxGridYZ)
    return refuse(request, "grid: y or z is %llu; at most %llu is possible", std::max(request.grid[1], request.grid[2]),
                  kMaxGridYZ);
  return 0;
}

int launch(LaunchRequest* request, KernelThread run_thread, u32 cluster_blocks) {
  request->failed = 0;
  request->switches = request->collectives = request->async_copies = request->event_count = 0;
  request->blocks = blocks_of(*request);
  if (int refused = check_sizes(*request)) return refused;
  if (request->grid[0] % cluster_blocks)
    return refuse(*request, "grid: x is %llu, which is not a multiple of the %llu blocks of a cluster", request->grid[0],
                  cluster_blocks);
  Grid grid(*request, run_thread, cluster_blocks);
  u32 workers = u32(std::min<u64>(std::max(request->workers, 1u), request->blocks / cluster_blocks));
  std::vector<std::thread> others;
  for (u32 i = 1; i < workers; ++i) others.emplace_back([&grid] { grid.work(); });
  grid.work();
  for (std::thread& other : others) other.join();
  acquire(request);
  return int(request->failed);
}

}  // namespace emulator
