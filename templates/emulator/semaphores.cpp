// Turns: blocks that add to the same place in global memory one after the other, which a number there counts; and how many
// have added all that they had.
#include "block.h"

namespace emulator {

// How often a thread looks again, each time after all others of its block went as far as they could: without other workers
// nothing else can happen then, but for those that look again, too.
static u32 most_polls() { return running_thread().block->request->workers > 1 ? 200000 : 1000; }

// Who comes before is another worker's block, or another thread of this one, or has been, or never is.
void semaphore_wait(const u32* place, u32 turn, Site site) {
  for (u32 polls = most_polls(); !semaphore_test(place, turn); poll(site))
    if (polls-- == 0)
      fail(site, "turn %u is waited for for ever: the next is %u, and no block that has begun is to have it", turn,
           __atomic_load_n(place, __ATOMIC_RELAXED));
}

bool semaphore_test(const u32* place, u32 turn) {
  if (__atomic_load_n(place, __ATOMIC_ACQUIRE) < turn) return false;
  acquire(const_cast<u32*>(place));
  return true;
}

static void wait_until_written() {
  bulk_wait_read(0);  // which writes, too, here
  acquire(&running_thread().bulk.written);
}

// Those before this one had their turns, or there were none.
void semaphore_release(u32* place, u32 turn, Site site) {
  wait_until_written();
  u32 next = __atomic_load_n(place, __ATOMIC_RELAXED);
  if (next != turn && next != 0)
    fail(site, "turn %u ends while the next is %u: semaphore_wait is missing, or somebody else's was left out", turn, next);
  release(place);
  __atomic_store_n(place, turn + 1, __ATOMIC_RELEASE);
}

void counter_add(u32* count, u32 amount) {
  wait_until_written();
  release(count);
  __atomic_fetch_add(count, amount, __ATOMIC_RELEASE);
}

// Whoever else waits in vain says so first: these threads wait for all others.
void counter_wait(const u32* count, u32 wanted, Site site) {
  for (u32 polls = 2 * most_polls(); __atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted; poll(site)) {
    if (polls-- > 0) continue;
    report_deadlock(*running_thread().block);
    abandon_block(*running_thread().block);
  }
  acquire(const_cast<u32*>(count));
}

}  // namespace emulator
