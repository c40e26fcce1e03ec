// Turns: blocks that add to the same place in global memory one after the other, which a number there counts.
#include <unistd.h>

#include "block.h"

namespace emulator {

constexpr u32 kPolls = 200000, kMicroseconds = 100;  // while other workers run other blocks

// A worker runs its blocks one after the other: who comes before is a block of another worker, or has been, or never is.
void await_turn(const u32* place, u32 turn, Site site) {
  u32 polls = running_thread().block->request->workers > 1 ? kPolls : 1;
  for (u32 i = 0; i < polls; ++i) {
    if (__atomic_load_n(place, __ATOMIC_ACQUIRE) >= turn) return;
    usleep(kMicroseconds);
  }
  fail(site, "turn %u is waited for for ever: the next is %u, and no block that has begun is to have it", turn,
       __atomic_load_n(place, __ATOMIC_RELAXED));
}

// Those before this one had their turns, or there were none.
void end_turn(u32* place, u32 turn, Site site) {
  bulk_wait_read(0);  // which writes, too, here
  u32 next = __atomic_load_n(place, __ATOMIC_RELAXED);
  if (next != turn && next != 0)
    fail(site, "turn %u ends while the next is %u: await_turn is missing, or somebody else's was left out", turn, next);
  __atomic_store_n(place, turn + 1, __ATOMIC_RELEASE);
}

}  // namespace emulator
