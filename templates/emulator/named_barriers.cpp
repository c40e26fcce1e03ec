// Named barriers: bar.sync and bar.arrive with a number and a count of threads.
#include "block.h"

namespace emulator {

static void check_named(const Block& block, const Barrier& barrier, u32 id, u32 threads, Site site) {
  if (id == 0 || id >= Block::kBarriers)
    fail(site, "named barriers are 1 to %d, not %u (0 is that of __syncthreads)", Block::kBarriers - 1, id);
  if (threads == 0 || threads % 32 || threads > block.threads.size())
    fail(site, "barrier %u: %u threads are not a number of warps that the block has", id, threads);
  if (barrier.arrived && barrier.count != threads)
    fail(site, "barrier %u: %u threads here, but %u at %s:%d", id, threads, barrier.count, barrier.site.file,
         barrier.site.line);
}

// barrier.sync.aligned: the lanes of a warp execute one instruction, and a warp arrives once per completion.
static void check_warp(Barrier& barrier, const Thread& self, u32 id, Site site) {
  WarpArrival& warp = barrier.warps[self.warp];
  if (warp.lanes >> self.lane & 1)
    fail(site, "barrier %u: this thread has come to it before, at %s:%d, and it has not opened since", id,
         warp.site.file, warp.site.line);
  if (warp.lanes && warp.site.line != site.line)
    fail(site, "barrier misuse: other lanes of this warp are at the barrier of %s:%d", warp.site.file, warp.site.line);
  warp.lanes |= 1u << self.lane;
  warp.site = site;
}

void named_barrier(u32 id, u32 threads, bool waits, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  Barrier& barrier = block.barriers[id % Block::kBarriers];
  check_named(block, barrier, id, threads, site);
  check_warp(barrier, self, id, site);
  record(Did::kReach, site, id, 0, threads);
  if (barrier.arrived == 0) barrier.count = threads, barrier.site = site;
  ++barrier.arrived;
  char* order = &barrier.order[barrier.meetings & 1];
  release(order);
  if (barrier.arrived == threads) {
    ++block.collectives;
    open_barrier(barrier);
  } else if (waits) {
    barrier.waiting.push_back(&self);
    self.barrier = int(id);
    suspend(State::kBlockBarrier, site);
  }
  if (!waits) return;
  acquire(order);
  record(Did::kLeave, site, id);
}

}  // namespace emulator
