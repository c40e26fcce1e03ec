// mbarriers: arrivals, announced bytes and phases of the 8-byte objects in shared memory.
#pragma once
#include "own_memory.h"
#include "vector_types.h"
#include "interface.h"

namespace emulator {

struct Block;
struct Thread;

struct MBarrier {
  u32 offset;             // in shared memory
  u32 arrivals, pending;  // arrivals of a phase; arrivals that the current one lacks
  int bytes;              // expected and not arrived yet; negative if they arrived before they were expected
  u32 phase;              // number of completed phases
  bool fenced;            // visible to TMA
  bool observed;          // whether a thread has waited for the last completed phase
  Thread *initialiser, *unseen_loader;
  Site site, announced_at, ended_at;
  Site unseen_load;       // load by unseen_loader that nothing has waited for yet; its file is null if none
  Vector<Thread*> waiting;
  Vector<u32> last_seen;  // by thread: 2 + phase of its last wait (-1: before the first); 0 without a wait
  char order[2];          // by the parity of the phase

  // Completes bytes of a TMA copy. `issued_in` is the phase that was current when the copy was issued.
  void complete_bytes(u32 count, u32 issued_in, Thread& issuer, Site issued_at);
};

}  // namespace emulator
