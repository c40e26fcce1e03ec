// The state of a running block: its threads, warps and barriers. Kernels see interface.h instead.
#pragma once
#include <vector>

#include "async_copies.h"
#include "async_proxy.h"
#include "clusters.h"
#include "fibers.h"
#include "mbarriers.h"
#include "ready_queue.h"
#include "tensor_copies.h"
#include "warpgroups.h"
#include "vector_types.h"
#include "interface.h"

namespace emulator {

struct Block;
struct Warp;

enum class State : int {
  kReady, kWarpCollective, kBlockBarrier, kClusterBarrier, kMbarrier, kProducts, kRegisters, kPolls, kFinished
};

enum class WarpOperation : int { kSyncWarp, kShuffle, kVote, kElect, kLoadMatrix, kStoreMatrix, kMultiply };

// The fiber on which a CUDA thread runs. Successive blocks use the same carriers; launch.cpp assigns them.
struct Carrier {
  Fiber fiber;
  Engine copy_engine;
};

struct Thread : ThreadContext {
  Carrier* carrier = nullptr;
  Block* block = nullptr;
  Warp* in_warp = nullptr;
  State state = State::kReady;
  Site site{};  // line at which it waits
  int barrier = 0, barrier_result = 0;
  MBarrier* mbarrier = nullptr;
  AsyncCopies copies;
  BulkCopies bulk;
  WarpgroupMember matrix;
};

// Lanes that meet in one collective. `mask` is 0 while the slot is free.
struct WarpGroup {
  u32 mask = 0, arrived = 0;
  WarpOperation operation{};
  Site site{};
  void* lanes[32];
  // Two, used alternately, so that a lane that leaves one operation is not ordered after arrivals at the next.
  unsigned meetings = 0;
  char order[2];
};

struct Warp {
  WarpGroup groups[32];
  u32 groups_used = 0;  // number of groups ever used
  u32 live = 0;
  u64 last_event = 0;  // number of the last event, from 1
  Thread* first = nullptr;
  ReadyLanes ready;
};

// The lanes of a warp that have arrived at a barrier, and the line.
struct WarpArrival {
  u32 lanes = 0;
  Site site{};
};

struct Barrier {
  u32 arrived = 0, votes = 0;
  u32 count = 0;  // threads that complete a named barrier
  BarrierKind kind{};
  Site site{};
  std::vector<Thread*> waiting;
  std::vector<WarpArrival> warps;
  unsigned meetings = 0;
  char order[2];
};

// The blocks of a cluster, which run together on one worker, and their barrier. Blocks without clusters have one each.
struct Cluster {
  Vector<Block*> blocks;
  u32 alive = 0;  // threads of all blocks
  u32 arrived = 0;
  Site site{};    // line of the first arrival
  std::vector<Thread*> waiting;
  Thread* executing = nullptr;  // while a thread of another block counts as running (AsBlock)
  unsigned meetings = 0;
  char order[2];
};

struct Block {
  static constexpr int kBarriers = 16;  // as in hardware; __syncthreads uses number 0

  LaunchRequest* request = nullptr;
  KernelThread run_thread = nullptr;
  Cluster* cluster = nullptr;
  u32 rank = 0;  // in the cluster
  uint3 index{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  ReadyQueue ready;
  Vector<Thread*> polling;  // threads that poll again when no thread is ready
  Warp* slow_warp = nullptr;  // in the random order
  Random random;
  unsigned char* shared = nullptr;
  u32 alive = 0;
  u32 copies_in_flight = 0;
  bool failed = false;
  Thread* blamed = nullptr;  // thread to which failures of an engine are attributed
  char message[sizeof(LaunchRequest::message)];
  u64 switches = 0, collectives = 0, async_copies = 0;
  Fiber worker;      // of a cluster's first block: the stack that started the cluster and continues when it ends
  char start_order;  // orders the time before the launch before every thread

  // TMA, wgmma, mbarriers and register budgets
  AsyncProxy async_proxy;
  Pool<MBarrier> mbarrier_pool;
  Vector<MBarrier*> mbarriers;
  TensorCopies tensor_copies;
  Vector<RemoteStore*> remote_stores;  // by other blocks of the cluster, in flight
  Pool<RemoteStore> remote_store_pool;
  Vector<unsigned char> store_data;
  std::vector<Warpgroup> warpgroups;
  Pool<MatrixProduct> product_pool;
  Pool<Accumulator> accumulator_pool;
  ProductWorkspace workspace;
  u32 products_in_flight = 0;  // issued by all threads and not performed
  u32 free_registers = 0;

  u32 whole_warpgroups() const { return u32(threads.size()) / kWarpgroupThreads; }
};

// The first block of a cluster, which has its failure and its worker's stack.
inline Block& first_of_cluster(Block& block) { return *block.cluster->blocks[0]; }
inline Thread& running_thread() { return *static_cast<Thread*>(current); }
inline u32 rank_of(const Thread& thread) { return thread.linear % kWarpgroupThreads; }  // in its warpgroup

// While it exists, failures name another thread than the running one.
class Blame {
 public:
  explicit Blame(Thread& thread) : block_(*thread.block), before_(block_.blamed) { block_.blamed = &thread; }
  ~Blame() { block_.blamed = before_; }
  Blame(const Blame&) = delete;
  Blame& operator=(const Blame&) = delete;

 private:
  Block& block_;
  Thread* before_;
};

// While it exists, a thread of this block counts as running: engines access the shared memory of their own block, also when
// a thread of another block of the cluster makes them progress.
class AsBlock {
 public:
  explicit AsBlock(Block& block) : cluster_(*block.cluster), running_(current), executing_(cluster_.executing) {
    if (!current || running_thread().block == &block) return;
    if (!executing_) cluster_.executing = &running_thread();
    current = &block.threads[0];
  }
  ~AsBlock() { current = running_, cluster_.executing = executing_; }
  AsBlock(const AsBlock&) = delete;
  AsBlock& operator=(const AsBlock&) = delete;

 private:
  Cluster& cluster_;
  ThreadContext* running_;
  Thread* executing_;
};

// The thread whose stack is in use.
inline Thread& executing_thread() {
  Thread* executing = running_thread().block->cluster->executing;
  return executing ? *executing : running_thread();
}

// ---- warp_collectives.cpp ----
// Runs when the last lane of `mask` has arrived. lanes[i] is the lane_data of lane i.
using WarpAction = void (*)(void* const* lanes, u32 mask);
void warp_collective(u32 mask, WarpOperation operation, void* lane_data, WarpAction action, Site site);

// ---- scheduler.cpp ----
void make_ready(Thread& thread);
void suspend(State state, Site site);  // waits until the running thread is made ready
void poll(Site site);                  // waits until only polling threads of the block can continue
void hesitate(Site site);              // polls in the slow warp
void run_cluster(Cluster& cluster);     // on the worker's stack: runs all threads to their end or to a failure

// ---- checks at the end of a thread or block, called by the scheduler ----
void check_warp_at_exit(Thread& thread);      // warp_collectives.cpp
void release_barriers_at_exit(Block& block);  // block_barriers.cpp
void release_cluster_at_exit(Cluster& cluster);  // clusters.cpp
void check_copies_at_exit(Thread& thread);    // async_copies.cpp
void check_stores_at_exit(Thread& thread);    // tensor_copies.cpp
void check_products_at_exit(Thread& thread);  // wgmma.cpp
void check_block_at_end(Block& block);        // engines.cpp

// ---- engines.cpp: progress of asynchronous operations ----
void advance_engines_at_random(Block& block);  // between any two steps
bool advance_engines(Block& block);            // when no thread is ready; returns false if nothing is pending
Engine& created(Block& block, Engine& engine, const char* name);  // creates it at the first use

// ---- single operations of engines ----
void land_random_copy(Block& block);                       // async_copies.cpp
void perform_tensor_copy(Block& block, size_t in_flight);  // tensor_copies.cpp
bool land_newest_load(Block& block);
void check_loads_at_end(Block& block);
void land_remote_store(Block& block, size_t in_flight);  // clusters.cpp
bool land_newest_remote_store(Block& block);
bool perform_awaited_product(Block& block);  // wgmma.cpp
bool perform_random_product(Block& block);

// ---- block_barriers.cpp, mbarriers.cpp, wgmma.cpp, register_budget.cpp ----
void open_barrier(Barrier& barrier);
MBarrier& mbarrier_at(Thread& self, u32 address, Site site, void* caller);
MBarrier& mbarrier_in(Block& block, const void* word, u32 offset, Site site, void* caller);
void arrive_at(MBarrier& barrier, Site site);
void fence_own_mbarriers(Thread& self);
void check_mbarriers_at_end(const Block& block);
Warpgroup& warpgroup_of(Thread& self, Site site);
void reset_registers(Block& block);
void check_registers_at_end(const Block& block);

// ---- timeline.cpp: records an action of the running thread's warp; `of_any_lane`: even if it is not lane 0 ----
void record(Did did, Site site, u32 object = 0, u32 phase = 0, u32 amount = 0, bool of_any_lane = false);

// ---- descriptions of waits for deadlock messages, with the results of snprintf ----
int describe_mbarrier_wait(const Thread& thread, char* text, size_t room);
int describe_product_wait(const Thread& thread, char* text, size_t room);
int describe_register_wait(const Thread& thread, char* text, size_t room);

// ---- failure.cpp ----
[[noreturn]] void abandon_block(Block& block);
void report_deadlock(Block& block);

}  // namespace emulator
