// The state of one running block: its threads, warps and barriers. The runtime's own view; kernels see interface.h.
#pragma once
#include <vector>

#include "async_copies.h"
#include "async_proxy.h"
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

enum class State : int { kReady, kWarpCollective, kBlockBarrier, kMbarrier, kProducts, kRegisters, kPolls, kFinished };

enum class WarpOperation : int { kSyncWarp, kShuffle, kVote, kElect, kLoadMatrix, kStoreMatrix, kMultiply };

// What a CUDA thread runs on. Blocks take turns on the same carriers; see launch.cpp for who gets which.
struct Carrier {
  Fiber fiber;
  Engine copy_engine;
};

struct Thread : ThreadContext {
  Carrier* carrier = nullptr;
  Block* block = nullptr;
  Warp* in_warp = nullptr;
  State state = State::kReady;
  Site site{};  // where it waits
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
  // Two, used in turn: who still leaves one meeting must not learn what happened before the next.
  unsigned meetings = 0;
  char order[2];
};

struct Warp {
  WarpGroup groups[32];
  u32 groups_used = 0;  // how many of them ever held a meeting
  u32 live = 0;
  u64 last_event = 0;  // its number, from 1
  Thread* first = nullptr;
  ReadyLanes ready;
};

// Which lanes of a warp have come to a barrier, and where.
struct WarpArrival {
  u32 lanes = 0;
  Site site{};
};

struct Barrier {
  u32 arrived = 0, votes = 0;
  u32 count = 0;  // threads that open a named barrier
  BarrierKind kind{};
  Site site{};
  std::vector<Thread*> waiting;
  std::vector<WarpArrival> warps;
  unsigned meetings = 0;
  char order[2];
};

struct Block {
  static constexpr int kBarriers = 16;  // as the hardware has; __syncthreads is number 0

  LaunchRequest* request = nullptr;
  KernelThread run_thread = nullptr;
  uint3 index{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  ReadyQueue ready;
  Vector<Thread*> polling;  // who looks again when nobody is ready
  Warp* slow_warp = nullptr;  // of a random order
  Random random;
  unsigned char* shared = nullptr;
  u32 alive = 0;
  u32 copies_in_flight = 0;
  bool failed = false;
  Thread* blamed = nullptr;  // whose doing an engine's failure is
  char message[sizeof(LaunchRequest::message)];
  u64 switches = 0, collectives = 0, async_copies = 0;
  Fiber worker;      // the stack that started the block and goes on when it ends
  char start_order;  // what happened before the launch happens before every thread

  // TMA, wgmma, mbarriers and register budgets
  AsyncProxy async_proxy;
  Pool<MBarrier> mbarrier_pool;
  Vector<MBarrier*> mbarriers;
  TensorCopies tensor_copies;
  Vector<unsigned char> store_data;
  std::vector<Warpgroup> warpgroups;
  Pool<MatrixProduct> product_pool;
  Pool<Accumulator> accumulator_pool;
  ProductWorkspace workspace;
  u32 products_in_flight = 0;  // issued by all and not done
  u32 free_registers = 0;

  u32 whole_warpgroups() const { return u32(threads.size()) / kWarpgroupThreads; }
};

inline Thread& running_thread() { return *static_cast<Thread*>(current); }
inline u32 rank_of(const Thread& thread) { return thread.linear % kWarpgroupThreads; }  // in its warpgroup

// While it lives, failures name another thread than the one that runs.
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

// ---- warp_collectives.cpp ----
// Runs when the last lane of `mask` has arrived; lanes[i] is what lane i passed as lane_data.
using WarpAction = void (*)(void* const* lanes, u32 mask);
void warp_collective(u32 mask, WarpOperation operation, void* lane_data, WarpAction action, Site site);

// ---- scheduler.cpp ----
void make_ready(Thread& thread);
void suspend(State state, Site site);  // waits until somebody makes the running thread ready
void poll(Site site);                  // waits until nobody of the block can go on but who polls
void hesitate(Site site);              // does so in the warp that is slow
void run_block(Block& block);          // on the worker's stack: runs all threads to their end, or to a failure

// ---- hooks of a thread's end, called by the scheduler ----
void check_warp_at_exit(Thread& thread);      // warp_collectives.cpp
void release_barriers_at_exit(Block& block);  // block_barriers.cpp
void check_copies_at_exit(Thread& thread);    // async_copies.cpp
void check_stores_at_exit(Thread& thread);    // tensor_copies.cpp
void check_products_at_exit(Thread& thread);  // wgmma.cpp
void check_block_at_end(Block& block);        // engines.cpp

// ---- engines.cpp: what is asynchronous goes on by itself ----
void advance_engines_at_random(Block& block);  // between any two steps
bool advance_engines(Block& block);            // when nobody is ready; false: nothing to do
Engine& created(Block& block, Engine& engine, const char* name);  // made when it is first asked for

// ---- what engines do, one piece at a time ----
void land_random_copy(Block& block);                       // async_copies.cpp
void perform_tensor_copy(Block& block, size_t in_flight);  // tensor_copies.cpp
bool land_newest_load(Block& block);
void check_loads_at_end(Block& block);
bool perform_awaited_product(Block& block);  // wgmma.cpp
bool perform_random_product(Block& block);

// ---- block_barriers.cpp, mbarriers.cpp, wgmma.cpp, register_budget.cpp ----
void open_barrier(Barrier& barrier);
MBarrier& mbarrier_at(Thread& self, u32 address, Site site, void* caller);
void fence_own_mbarriers(Thread& self);
void check_mbarriers_at_end(const Block& block);
Warpgroup& warpgroup_of(Thread& self, Site site);
void reset_registers(Block& block);
void check_registers_at_end(const Block& block);

// ---- timeline.cpp: a step of the running thread's warp; `of_any_lane`: not of lane 0 alone ----
void record(Did did, Site site, u32 object = 0, u32 phase = 0, u32 amount = 0, bool of_any_lane = false);

// ---- in words, for deadlocks: as snprintf ----
int describe_mbarrier_wait(const Thread& thread, char* text, size_t room);
int describe_product_wait(const Thread& thread, char* text, size_t room);
int describe_register_wait(const Thread& thread, char* text, size_t room);

// ---- failure.cpp ----
[[noreturn]] void abandon_block(Block& block);
void report_deadlock(Block& block);

}  // namespace emulator
