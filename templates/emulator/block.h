// The state of one running block: its threads, warps and barriers. The runtime's own view; kernels see interface.h.
#pragma once
#include <vector>

#include "async_copies.h"
#include "fibers.h"
#include "ready_queue.h"
#include "vector_types.h"
#include "interface.h"

namespace emulator {

struct Block;
struct Warp;

enum class State : int { kReady, kWarpCollective, kBlockBarrier, kFinished };

enum class WarpOperation : int { kSyncWarp, kShuffle, kVote, kLoadMatrix, kMultiply };

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
  AsyncCopies copies;
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
  Thread* first = nullptr;
  ReadyLanes ready;
};

struct Barrier {
  u32 arrived = 0, votes = 0;
  BarrierKind kind{};
  Site site{};
  std::vector<Thread*> waiting;
  std::vector<Site> warp_sites;  // where each warp's first lane arrived; file is null before
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
  Random random;
  unsigned char* shared = nullptr;
  u32 alive = 0;
  u32 copies_in_flight = 0;
  bool failed = false;
  char message[sizeof(LaunchRequest::message)];
  u64 switches = 0, collectives = 0, async_copies = 0;
  Fiber worker;      // the stack that started the block and goes on when it ends
  char start_order;  // what happened before the launch happens before every thread
};

inline Thread& running_thread() { return *static_cast<Thread*>(current); }

// ---- warp_collectives.cpp ----
// Runs when the last lane of `mask` has arrived; lanes[i] is what lane i passed as lane_data.
using WarpAction = void (*)(void* const* lanes, u32 mask);
void warp_collective(u32 mask, WarpOperation operation, void* lane_data, WarpAction action, Site site);

// ---- scheduler.cpp ----
void make_ready(Thread& thread);
void suspend(State state, Site site);  // waits until somebody makes the running thread ready
void run_block(Block& block);          // on the worker's stack: runs all threads to their end, or to a failure

// ---- hooks of a thread's end, called by the scheduler ----
void check_warp_at_exit(Thread& thread);      // warp_collectives.cpp
void release_barriers_at_exit(Block& block);  // block_barriers.cpp
void check_copies_at_exit(Thread& thread);    // async_copies.cpp
void land_random_copy(Block& block);          // async_copies.cpp

// ---- failure.cpp ----
[[noreturn]] void abandon_block(Block& block);
void report_deadlock(Block& block);

}  // namespace emulator
