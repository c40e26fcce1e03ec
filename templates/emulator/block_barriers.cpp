// __syncthreads and its variants: barrier 0 of the sixteen of a block, which waits for all threads that have not ended.
#include "block.h"

namespace emulator {

static int result_of(const Barrier& barrier) {
  switch (barrier.kind) {
    case BarrierKind::kOr:
      return barrier.votes != 0;
    case BarrierKind::kAnd:
      return barrier.votes == barrier.arrived;
    case BarrierKind::kCount:
      return int(barrier.votes);
    case BarrierKind::kSync:
      break;
  }
  return 0;
}

// bar.sync is .aligned: the lanes of a warp must execute the same instruction, and all threads the same variant.
static void check_arrival(Barrier& barrier, const Thread& self, BarrierKind kind, Site site) {
  if (barrier.arrived && barrier.kind != kind)
    fail(site, "barrier misuse: another kind of __syncthreads waits at %s:%d", barrier.site.file, barrier.site.line);
  WarpArrival& warp = barrier.warps[self.warp];
  if (warp.lanes && warp.site.line != site.line)
    fail(site, "barrier misuse: other lanes of this warp wait at the barrier of %s:%d", warp.site.file, warp.site.line);
  warp.lanes |= 1u << self.lane;
  warp.site = site;
}

void open_barrier(Barrier& barrier) {
  int result = result_of(barrier);
  ++barrier.meetings;
  barrier.arrived = barrier.votes = 0;
  for (WarpArrival& warp : barrier.warps) warp = WarpArrival{};
  for (Thread* thread : barrier.waiting) {
    thread->barrier_result = result;
    make_ready(*thread);
  }
  barrier.waiting.clear();
}

int block_barrier(int identifier, BarrierKind kind, int predicate, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  Barrier& barrier = block.barriers[identifier];
  check_arrival(barrier, self, kind, site);
  record(Did::kReach, site, u32(identifier), 0, block.alive);
  if (barrier.arrived == 0) barrier.kind = kind, barrier.site = site;
  ++barrier.arrived;
  barrier.votes += predicate != 0;
  char* order = &barrier.order[barrier.meetings & 1];
  release(order);
  if (barrier.arrived == block.alive) {
    ++block.collectives;
    self.barrier_result = result_of(barrier);
    open_barrier(barrier);
  } else {
    barrier.waiting.push_back(&self);
    self.barrier = identifier;
    suspend(State::kBlockBarrier, site);
  }
  acquire(order);
  record(Did::kLeave, site, u32(identifier));
  return self.barrier_result;
}

void release_barriers_at_exit(Block& block) {
  Barrier& barrier = block.barriers[0];
  if (barrier.arrived && barrier.arrived == block.alive) open_barrier(barrier);
}

// ThreadSanitizer does not model fences. One object that all threads acquire and release orders at least as much.
void memory_fence() {
  static char fence;
  release(&fence);
  acquire(&fence);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace emulator
