// Shuffles, votes and elections: what goes from lane to lane. In the runtime and not in a kernel's header, since the
// last lane to arrive serves all: compiled into a kernel, ThreadSanitizer would take that for a race.
#include "block.h"

namespace emulator {

struct ShuffleLane {
  u64 bits;
  u32 source;
  u64 result;
};

// A lane outside the mask has no value to give; CUDA calls the result undefined, and NaN is what shows.
static void shuffle_action(void* const* lanes, u32 mask) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    ShuffleLane& self = *static_cast<ShuffleLane*>(lanes[lane]);
    bool given = mask >> self.source & 1;
    self.result = given ? static_cast<ShuffleLane*>(lanes[self.source])->bits : ~0ull;
  }
}

u64 shuffle_bits(u32 mask, u64 bits, u32 source_lane, Site site) {
  ShuffleLane lane{bits, source_lane, 0};
  warp_collective(mask, WarpOperation::kShuffle, &lane, shuffle_action, site);
  return lane.result;
}

struct VoteLane {
  bool predicate;
  u32 result;
};

static void vote_action(void* const* lanes, u32 mask) {
  u32 ballot = 0;
  for (u32 lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) && static_cast<VoteLane*>(lanes[lane])->predicate) ballot |= 1u << lane;
  for (u32 lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) static_cast<VoteLane*>(lanes[lane])->result = ballot;
}

u32 ballot(u32 mask, bool predicate, Site site) {
  VoteLane lane{predicate, 0};
  warp_collective(mask, WarpOperation::kVote, &lane, vote_action, site);
  return lane.result;
}

// The same lane of a warp each time, as PTX promises, but which one is the schedule's choice.
bool elect(Site site) {
  Thread& self = running_thread();
  warp_collective(0xffffffffu, WarpOperation::kElect, nullptr, nullptr, site);
  return self.lane == self.block->request->seed % 32;
}

}  // namespace emulator
