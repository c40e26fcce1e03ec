// cp.async. Between its issue and its completion the destination holds NaN, so that a read without a wait shows in the
// values. To ThreadSanitizer a copy is an engine of its own that may write at any time in between.
#include "block.h"

namespace emulator {

struct Chunk {
  u64 words[2];
};

// Uses plain assignments: ThreadSanitizer intercepts memcpy and memset even here and would attribute them to the
// thread.
static void move_chunk(const AsyncCopy& copy) {
  Chunk zero{};
  *static_cast<Chunk*>(copy.destination) = copy.source ? *static_cast<const Chunk*>(copy.source) : zero;
}

static void land(Thread& owner, AsyncCopy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  --owner.block->copies_in_flight;
  AsEngine engine(created(*owner.block, owner.carrier->copy_engine, "cp.async"));
  if (kThreadSanitizer) {
    if (copy.source) note_read(copy.source, copy.bytes, copy.caller);
    note_write(copy.destination, copy.bytes, copy.caller);
    release(&owner.copies.landing_order[copy.group % AsyncCopies::kOrders]);
  }
  move_chunk(copy);
}

// Bounds and alignment are checked at the issue, so that errors name its line, whenever the copy completes.
static AsyncCopy checked_copy(u32 destination, const void* source, u32 bytes, bool valid, Site site, void* caller) {
  if (bytes != sizeof(Chunk)) fail(site, "cp.async of %u bytes: only 16 is emulated", bytes);
  if (valid && u64(source) % bytes) fail(site, "misaligned global address %p: a copy of %u bytes", source, bytes);
  void* pointer = shared_pointer(destination, bytes, bytes, site);
  running_thread().block->async_proxy.check_generic(destination - kWindowBase, bytes, true, "cp.async", site);
  return {pointer, valid ? source : nullptr, bytes, running_thread().copies.open_group, false, site, caller};
}

void copy_async(u32 shared_destination, const void* global_source, u32 bytes, bool valid, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  AsyncCopy copy = checked_copy(shared_destination, global_source, bytes, valid, site, __builtin_return_address(0));
  CopyPolicy policy = CopyPolicy(block.request->copies);
  ++block.async_copies;
  ++block.copies_in_flight;
  if (!kThreadSanitizer && copy.source) note_read(copy.source, bytes, copy.caller);
  if (kThreadSanitizer) {
    release(&self.copies.issue_order);
    AsEngine engine(created(block, self.carrier->copy_engine, "cp.async"));
    acquire(&self.copies.issue_order);
    note_write(copy.destination, bytes, copy.caller);  // it may complete from now on
  }
  *static_cast<Chunk*>(copy.destination) = {{~0ull, ~0ull}};
  if (policy == CopyPolicy::kEarly || (policy == CopyPolicy::kRandom && block.random.below(4) == 0)) land(self, copy);
  self.copies.issued.push_back(copy);
  record(Did::kCopy, site, 0, 0, bytes);
}

void copy_async_commit() {
  ++running_thread().copies.open_group;
  record(Did::kCommitCopies, Site{});
}

void copy_async_wait(int pending) {
  Thread& self = running_thread();
  AsyncCopies& copies = self.copies;
  u32 complete = copies.open_group > u32(pending) ? copies.open_group - u32(pending) : 0;
  size_t kept = 0;
  for (AsyncCopy& copy : copies.issued) {
    if (copy.group < complete)
      land(self, copy);
    else
      copies.issued[kept++] = copy;
  }
  copies.issued.resize(kept);
  for (; copies.ordered_groups < complete; ++copies.ordered_groups)
    acquire(&copies.landing_order[copies.ordered_groups % AsyncCopies::kOrders]);
  record(Did::kAwaitCopies, Site{}, 0, 0, u32(pending));
}

void copy_sync(u32 shared_destination, const void* global_source, u32 bytes, bool valid, Site site) {
  void* caller = __builtin_return_address(0);
  AsyncCopy copy = checked_copy(shared_destination, global_source, bytes, valid, site, caller);
  if (copy.source) note_read(copy.source, bytes, caller);
  note_write(copy.destination, bytes, caller);
  move_chunk(copy);
}

void land_random_copy(Block& block) {
  u32 threads = u32(block.threads.size()), first = block.random.below(threads);
  for (u32 i = 0; i < threads; ++i) {
    Thread& owner = block.threads[(first + i) % threads];
    u32 count = u32(owner.copies.issued.size());
    if (!count) continue;
    u32 start = block.random.below(count);
    for (u32 j = 0; j < count; ++j) {
      AsyncCopy& copy = owner.copies.issued[(start + j) % count];
      if (!copy.landed) return land(owner, copy);
    }
  }
}

void check_copies_at_exit(Thread& thread) {
  if (thread.copies.issued.empty()) return;
  fail(thread.copies.issued.front().site, "the thread ends with %zu of its asynchronous copies still in flight",
       thread.copies.issued.size());
}

}  // namespace emulator
