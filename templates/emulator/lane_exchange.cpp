// Exchanges between lanes: shuffles, votes and elections. They are in the runtime instead of a header, since the last
// lane to arrive performs them for all lanes: in a kernel's unit ThreadSanitizer would report that as a race.
#include "block.h"

namespace emulator {

struct ShuffleLane {
  u64 bits;
  u32 source;
  u64 result;
};

// A lane outside of the mask provides no value. In CUDA the result is undefined; here it is NaN.
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

// Elects the same lane of a warp each time, as PTX guarantees. The schedule chooses which one.
bool elect(Site site) {
  Thread& self = running_thread();
  warp_collective(0xffffffffu, WarpOperation::kElect, nullptr, nullptr, site);
  return self.lane == self.block->request->seed % 32;
}

}  // namespace emulator
