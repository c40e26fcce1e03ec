// Semaphores and counters in global memory, by which blocks wait for each other: semaphores order the additions of
// several blocks to the same memory, and counters count the blocks that have added all of their values.
#include "block.h"

namespace emulator {

// How often a thread polls before it gives up. All other threads of its block run as far as they can between two polls,
// so that with a single worker only other polling threads can change the value.
static u32 max_polls() { return running_thread().block->request->workers > 1 ? 200000 : 1000; }

// The value may come from a block of another worker, from another thread of this block, from an earlier block, or
// never.
void semaphore_wait(const u32* semaphore, u32 value, Site site) {
  for (u32 polls = max_polls(); !semaphore_test(semaphore, value); poll(site))
    if (polls-- == 0)
      fail(site, "a semaphore never reaches %u: it is %u, and no block that has begun advances it", value,
           __atomic_load_n(semaphore, __ATOMIC_RELAXED));
}

bool semaphore_test(const u32* semaphore, u32 value) {
  if (__atomic_load_n(semaphore, __ATOMIC_ACQUIRE) < value) return false;
  acquire(const_cast<u32*>(semaphore));
  return true;
}

static void wait_until_written() {
  bulk_wait_read(0);  // performs the writes as well
  acquire(&running_thread().bulk.written);
}

// Requires that the semaphore is at `value`. It may also be 0, since the first to add may skip all earlier values.
void semaphore_release(u32* semaphore, u32 value, Site site) {
  wait_until_written();
  u32 current = __atomic_load_n(semaphore, __ATOMIC_RELAXED);
  if (current != value && current != 0)
    fail(site, "semaphore_release from %u, but the semaphore is %u: a semaphore_wait is missing, or another release",
         value, current);
  release(semaphore);
  __atomic_store_n(semaphore, value + 1, __ATOMIC_RELEASE);
}

void counter_add(u32* counter, u32 amount) {
  wait_until_written();
  release(counter);
  __atomic_fetch_add(counter, amount, __ATOMIC_RELEASE);
}

// Polls longer than semaphore_wait, so that a failing semaphore is reported first: these threads wait for all others.
void counter_wait(const u32* counter, u32 target, Site site) {
  for (u32 polls = 2 * max_polls(); __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target; poll(site)) {
    if (polls-- > 0) continue;
    report_deadlock(*running_thread().block);
    abandon_block(*running_thread().block);
  }
  acquire(const_cast<u32*>(counter));
}

}  // namespace emulator
