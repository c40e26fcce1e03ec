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
  u32 arrivals, pending;  // that a phase takes; that this one still waits for
  int bytes;              // announced and not here yet; negative: here before they were announced
  u32 phase;              // how many have ended
  bool fenced;            // copies may use it
  bool observed;          // somebody has waited for the last phase that ended
  Thread *initialiser, *unseen_loader;
  Site site, announced_at, ended_at;
  Site unseen_load;       // by unseen_loader: its bytes are here, and nobody has waited for them; file is null if none
  Vector<Thread*> waiting;
  Vector<u32> last_seen;  // by thread: 2 + the phase that it waited for last, -1 being the one before the first; or 0
  char order[2];          // by parity of the phase

  // TMA's bytes arrive. `issued_in` is the phase that was running when the copy was issued.
  void complete_bytes(u32 count, u32 issued_in, Thread& issuer, Site issued_at);
};

}  // namespace emulator
