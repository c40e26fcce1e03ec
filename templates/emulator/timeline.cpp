// Records the actions of the warps of the first block in LaunchRequest::events. The actions of lane 0 stand for its
// warp, except for those of an elected lane. Nothing is recorded under a sanitizer.
#include "block.h"

namespace emulator {

// Consecutive actions of the same kind at one line, or at two adjacent lines, are merged into one event, and their
// amounts are added.
static bool joins(const TimelineEvent& last, const TimelineEvent& next) {
  bool adds_up = next.did == u32(Did::kMultiply) || next.did == u32(Did::kMultiplyAsync) ||
                 next.did == u32(Did::kCopy) || next.did == u32(Did::kStore);
  return adds_up && last.did == next.did && next.line - last.line + 1 <= 2 && last.exponentials == next.exponentials;
}

void count_exponential() { ++running_thread().exponentials; }

void record(Did did, Site site, u32 object, u32 phase, u32 amount, bool of_any_lane) {
  Thread& self = running_thread();
  LaunchRequest& request = *self.block->request;
  if (!request.events || (self.lane && !of_any_lane)) return;
  if (self.block->index.x || self.block->index.y || self.block->index.z) return;
  TimelineEvent next{self.warp, u32(did), u32(site.line), self.exponentials, object, phase, amount};
  u64& last = self.in_warp->last_event;
  if (last && last <= request.event_capacity && joins(request.events[last - 1], next)) {
    request.events[last - 1].amount += amount;
    return;
  }
  last = ++request.event_count;
  if (last <= request.event_capacity) request.events[last - 1] = next;
}

}  // namespace emulator
