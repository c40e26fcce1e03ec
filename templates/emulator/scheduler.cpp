// Runs the blocks of a cluster: switches threads whenever one waits, until all have ended or none can continue.
#include <unistd.h>

#include "block.h"

namespace emulator {

constexpr u32 kPollMicroseconds = 100;

__thread ThreadContext* current __attribute__((tls_model("initial-exec")));

void make_ready(Thread& thread) {
  thread.state = State::kReady;
  thread.block->ready.push(thread);
}

// Wakes the threads that poll for another block, after some time for the other workers to run.
static bool wake_polling(Block& block) {
  if (block.polling.empty()) return false;
  if (block.request->workers > 1) usleep(kPollMicroseconds);
  for (Thread* thread : block.polling) make_ready(*thread);
  block.polling.clear();
  return true;
}

// The rank at which the search for a ready thread begins. In the greedy order the cluster stays in one block, so that its
// blocks drift as far apart as their barriers allow.
static u32 first_rank(Block& block) {
  const u32 size = u32(block.cluster->blocks.size());
  if (size == 1) return 0;
  switch (Order(block.request->order)) {
    case Order::kInOrder:
      return 0;
    case Order::kReverse:
      return size - 1;
    case Order::kRandom:
      return block.random.below(size);
    case Order::kGreedyWarp:
      break;
  }
  return block.rank;
}

// Returns a ready thread of the cluster to which the block belongs, or null.
static Thread* next_ready(Block& block) {
  const Vector<Block*>& blocks = block.cluster->blocks;
  const u32 first = first_rank(block);
  for (u32 i = 0; i < blocks.size(); ++i) {
    Block& other = *blocks[(first + i) % blocks.size()];
    if (!other.ready.empty()) return &other.ready.pop(other.random);
  }
  return nullptr;
}

// Advances the engines of a block whose threads are waiting, or wakes the polling threads of all blocks.
static bool let_continue(const Vector<Block*>& blocks) {
  for (Block* block : blocks)
    if (advance_engines(*block)) return true;
  bool woken = false;
  for (Block* block : blocks) woken |= wake_polling(*block);
  return woken;
}

static Thread* next_thread(Block& block) {
  const Vector<Block*>& blocks = block.cluster->blocks;
  for (Block* each : blocks) advance_engines_at_random(*each);
  for (;;) {
    if (Thread* thread = next_ready(block)) return thread;
    if (!let_continue(blocks)) return nullptr;
  }
}

static Thread& next_thread_or_deadlock(Block& block) {
  Thread* next = next_thread(block);
  if (next) return *next;
  report_deadlock(block);
  abandon_block(block);
}

static void continue_with(Block& block, Fiber& from, Thread& to, bool finished) {
  current = &to;
  ++block.switches;
  switch_fiber(from, to.carrier->fiber, finished);
}

void suspend(State state, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  self.state = state;
  self.site = site;
  Thread& next = next_thread_or_deadlock(block);
  if (&next != &self) continue_with(block, self.carrier->fiber, next, false);  // an engine may have ended the wait
}

void poll(Site site) {
  Thread& self = running_thread();
  if (__atomic_load_n(&self.block->request->failed, __ATOMIC_RELAXED)) abandon_block(*self.block);  // by another block
  self.block->polling.push_back(&self);
  suspend(State::kPolls, site);
}

// In the random order with a single worker, one warp of each block is slow: after an arrival it continues only when no
// other thread can, so that the others get as far ahead of it as the barriers allow.
void hesitate(Site site) {
  Thread& self = running_thread();
  if (self.in_warp == self.block->slow_warp) poll(site);
}

static void end_thread(Thread& self) {
  Block& block = *self.block;
  check_copies_at_exit(self);
  check_stores_at_exit(self);
  check_products_at_exit(self);
  check_warp_at_exit(self);
  self.state = State::kFinished;
  self.in_warp->live &= ~(1u << self.lane);
  --block.alive;
  --block.cluster->alive;
  release_barriers_at_exit(block);
  release_cluster_at_exit(*block.cluster);
  if (block.alive == 0) check_block_at_end(block);
  if (block.cluster->alive == 0) switch_fiber(self.carrier->fiber, first_of_cluster(block).worker, true);
  continue_with(block, self.carrier->fiber, next_thread_or_deadlock(block), true);
  __builtin_unreachable();
}

static void thread_main() {
  Thread& self = running_thread();
  fiber_entered(self.carrier->fiber);
  acquire(&self.block->start_order);
  self.block->run_thread(self.block->request->arguments);
  release(self.block->request);  // launch() acquires it: results are read after every thread's end
  end_thread(self);
}

void run_cluster(Cluster& cluster) {
  for (Block* block : cluster.blocks) {
    const bool has_slow_warp = Order(block->request->order) == Order::kRandom && block->request->workers == 1;
    block->slow_warp = has_slow_warp ? &block->warps[block->random.below(u32(block->warps.size()))] : nullptr;
    for (Thread& thread : block->threads) {
      prepare(thread.carrier->fiber, thread_main);
      make_ready(thread);
    }
    release(&block->start_order);
  }
  Block& first = *cluster.blocks[0];
  continue_with(first, first.worker, *next_thread(first), false);
  current = nullptr;
}

}  // namespace emulator
