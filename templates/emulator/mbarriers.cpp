// mbarriers. Their state is kept outside of shared memory, which holds only a mark, so that overwriting one is
// detected.
#include "mbarriers.h"

#include <stdio.h>
#include <string.h>

#include "block.h"

namespace emulator {

constexpr u32 kBarrierBytes = 8, kMaxArrivals = (1u << 20) - 1;
constexpr int kMaxBytes = (1 << 20) - 1;
constexpr u64 kMark = 0x5245495252414246ull;

static MBarrier* find(Block& block, u32 offset) {
  for (MBarrier* barrier : block.mbarriers)
    if (barrier->offset == offset) return barrier;
  return nullptr;
}

MBarrier& mbarrier_at(Thread& self, u32 address, Site site, void* caller) {
  const void* word = shared_pointer(address, kBarrierBytes, kBarrierBytes, site);
  return mbarrier_in(*self.block, word, address - kWindowBase, site, caller);
}

MBarrier& mbarrier_in(Block& block, const void* word, u32 offset, Site site, void* caller) {
  MBarrier* barrier = find(block, offset);
  if (!barrier) fail(site, "no mbarrier was initialised at offset %u of shared memory", offset);
  u64 mark;
  memcpy(&mark, word, sizeof mark);
  if (mark != kMark + offset)
    fail(site, "the mbarrier at offset %u (initialised at %s:%d) was overwritten", offset, barrier->site.file,
         barrier->site.line);
  note_read(word, kBarrierBytes, caller);
  return *barrier;
}

void mbarrier_init(u32 address, u32 arrivals, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  void* word = shared_pointer(address, kBarrierBytes, kBarrierBytes, site);
  u32 offset = address - kWindowBase;
  if (arrivals == 0 || arrivals > kMaxArrivals)
    fail(site, "an mbarrier of %u arrivals: from 1 to %u are possible", arrivals, kMaxArrivals);
  if (const MBarrier* other = find(block, offset))
    fail(site, "the mbarrier at offset %u was initialised before, at %s:%d", offset, other->site.file,
         other->site.line);
  MBarrier& barrier = block.mbarrier_pool.take();
  barrier.offset = offset;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.bytes = 0;
  barrier.phase = 0;
  barrier.fenced = barrier.observed = false;
  barrier.initialiser = &self;
  barrier.site = barrier.announced_at = barrier.ended_at = site;
  barrier.unseen_load = Site{};
  barrier.waiting.clear();
  barrier.last_seen.assign(block.threads.size(), 0);
  block.mbarriers.push_back(&barrier);
  u64 mark = kMark + offset;
  memcpy(word, &mark, sizeof mark);
  note_write(word, kBarrierBytes, __builtin_return_address(0));
}

void fence_own_mbarriers(Thread& self) {
  for (MBarrier* barrier : self.block->mbarriers)
    if (barrier->initialiser == &self) barrier->fenced = true;
}

void mbarrier_fence_init() { fence_own_mbarriers(running_thread()); }

// Ends the phase if nothing is missing after the operation at `site`.
static void end_phase_if_due(Block& block, MBarrier& barrier, Site site) {
  if (barrier.pending || barrier.bytes > 0) return;
  if (barrier.bytes < 0)
    fail(site, "wrong byte count: %d bytes more have arrived at the mbarrier at offset %u than %s:%d announced",
         -barrier.bytes, barrier.offset, barrier.announced_at.file, barrier.announced_at.line);
  if (barrier.phase && !barrier.observed)
    fail(site,
         "over-arrival: a phase of the mbarrier at offset %u (of %u arrivals, initialised at %s:%d) ends before "
         "anybody has waited for the one that ended at %s:%d",
         barrier.offset, barrier.arrivals, barrier.site.file, barrier.site.line, barrier.ended_at.file,
         barrier.ended_at.line);
  ++barrier.phase;
  ++block.collectives;
  barrier.pending = barrier.arrivals;
  barrier.ended_at = site;
  barrier.observed = !barrier.waiting.empty();
  if (barrier.observed) barrier.unseen_load = Site{};
  for (Thread* thread : barrier.waiting) make_ready(*thread);  // all of them wait for the phase that ends
  barrier.waiting.clear();
}

void arrive_at(MBarrier& barrier, Site site) {
  if (barrier.pending == 0)
    fail(site, "over-arrival: the mbarrier at offset %u has had its %u arrivals and waits for %d bytes only",
         barrier.offset, barrier.arrivals, barrier.bytes);
  --barrier.pending;
  record(Did::kArrive, site, barrier.offset, barrier.phase, 0, true);
  release(&barrier.order[barrier.phase & 1]);
  end_phase_if_due(*running_thread().block, barrier, site);
}

void mbarrier_arrive(u32 address, Site site) {
  Thread& self = running_thread();
  arrive_at(mbarrier_at(self, address, site, __builtin_return_address(0)), site);
  hesitate(site);
}

void mbarrier_arrive_expect_bytes(u32 address, u32 bytes, Site site) {
  Thread& self = running_thread();
  MBarrier& barrier = mbarrier_at(self, address, site, __builtin_return_address(0));
  if (bytes > u32(kMaxBytes) || barrier.bytes + int(bytes) > kMaxBytes)
    fail(site, "an mbarrier counts up to %d bytes in flight, not %lld", kMaxBytes, (long long)barrier.bytes + bytes);
  barrier.bytes += int(bytes);
  barrier.announced_at = site;
  arrive_at(barrier, site);
}

void MBarrier::complete_bytes(u32 count, u32 issued_in, Thread& issuer, Site issued_at) {
  if (phase != issued_in)
    fail(issued_at,
         "wrong byte count: this copy's %u bytes arrive at the mbarrier at offset %u after the phase in which it was "
         "issued has ended (at %s:%d; bytes were announced at %s:%d)",
         count, offset, ended_at.file, ended_at.line, announced_at.file, announced_at.line);
  bytes -= int(count);
  unseen_load = issued_at;
  unseen_loader = &issuer;
  release(&order[phase & 1]);
  end_phase_if_due(*issuer.block, *this, issued_at);
}

// Requires that each wait of a thread is for a later phase than its previous one. Since there are only two parities, a
// completed phase cannot be told from a future one, and a wait for the wrong one returns at once.
static void check_parity(MBarrier& barrier, Thread& self, u32 phase_and_two, Site site) {
  u32& seen = barrier.last_seen[self.linear];
  if (seen == phase_and_two)
    fail(site,
         "parity slip: this thread waits again for a phase of the mbarrier at offset %u (initialised at %s:%d) that it "
         "has waited for before; the next to end is of the other parity",
         barrier.offset, barrier.site.file, barrier.site.line);
  seen = phase_and_two;
}

void mbarrier_wait(u32 address, u32 parity, Site site) {
  Thread& self = running_thread();
  MBarrier& barrier = mbarrier_at(self, address, site, __builtin_return_address(0));
  if (parity > 1) fail(site, "the parity of an mbarrier's phase is 0 or 1, not %u", parity);
  bool has_ended = (barrier.phase & 1) != parity;
  check_parity(barrier, self, barrier.phase + (has_ended ? 1 : 2), site);
  u32 awaited = barrier.phase - (has_ended ? 1 : 0);
  if (has_ended) {
    barrier.observed = true;
    barrier.unseen_load = Site{};
  } else {
    barrier.waiting.push_back(&self);
    self.mbarrier = &barrier;
    suspend(State::kMbarrier, site);
  }
  record(Did::kAwaitPhase, site, barrier.offset, awaited);
  acquire(&barrier.order[parity]);
}

void check_mbarriers_at_end(const Block& block) {
  for (const MBarrier* barrier : block.mbarriers) {
    if (!barrier->unseen_load.file) continue;
    Blame loader(*barrier->unseen_loader);
    fail(barrier->unseen_load, "the block ends, and nobody has waited for this TMA load");
  }
}

int describe_mbarrier_wait(const Thread& thread, char* text, size_t room) {
  const MBarrier& barrier = *thread.mbarrier;
  return snprintf(text, room,
                  "wait at %s:%d for phase %u (parity %u) of the mbarrier at offset %u, initialised at %s:%d: %u of %u "
                  "arrivals and %d bytes are missing",
                  thread.site.file, thread.site.line, barrier.phase, barrier.phase & 1, barrier.offset,
                  barrier.site.file, barrier.site.line, barrier.pending, barrier.arrivals, barrier.bytes);
}

}  // namespace emulator
