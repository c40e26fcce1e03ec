// Clusters of blocks: stores by st.async to the shared memory of another block, until they are performed.
#pragma once
#include "mbarriers.h"
#include "sanitizers.h"

namespace emulator {

// A store of 16 bytes to another block's shared memory, which completes bytes of an mbarrier there.
struct RemoteStore {
  u32 offset;  // in the other block's shared memory
  u32 words[4];
  Thread* issuer;
  MBarrier* barrier;
  u32 phase;   // current phase of the barrier at the issue
  Site site;
  void* caller;
  Engine engine;
  char issue_order;
};

}  // namespace emulator
