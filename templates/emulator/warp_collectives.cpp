// Operations in which the lanes of a mask meet. The last lane to arrive performs the operation for all.
#include "block.h"

namespace emulator {

static const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kSyncWarp:
      return "__syncwarp";
    case WarpOperation::kShuffle:
      return "shuffle";
    case WarpOperation::kVote:
      return "vote";
    case WarpOperation::kElect:
      return "elect";
    case WarpOperation::kLoadMatrix:
      return "ldmatrix";
    case WarpOperation::kStoreMatrix:
      return "stmatrix";
    case WarpOperation::kMultiply:
      return "mma";
  }
  return "?";
}

// .aligned operations of PTX must be the same instruction in every lane, not only the same kind.
static bool is_aligned(WarpOperation operation) {
  return operation == WarpOperation::kLoadMatrix || operation == WarpOperation::kStoreMatrix ||
         operation == WarpOperation::kMultiply;
}

// __syncwarp orders memory; shuffles, votes, mma and stmatrix do not. ldmatrix completes when its reads are complete in
// all lanes, so that a warp may then overwrite its source. A happens-before relation cannot distinguish reads from
// writes, so that here ldmatrix orders both.
static bool orders_memory(WarpOperation operation) {
  return operation == WarpOperation::kSyncWarp || operation == WarpOperation::kLoadMatrix;
}

// Masks may overlap: some lanes may wait for the whole warp while others are still in an operation of their own. But
// two lanes that wait for each other in different operations never continue.
static void check_divergence(const WarpGroup& group, u32 mask, u32 lane, WarpOperation operation, Site site) {
  if ((group.mask >> lane & 1) && (group.arrived & mask))
    fail(site, "divergent warp collective: %s of lanes %08x, but lanes %08x already wait in %s at %s:%d",
         name_of(operation), mask, group.arrived & mask, name_of(group.operation), group.site.file, group.site.line);
}

static WarpGroup& group_of(Warp& warp, u32 mask, u32 lane, WarpOperation operation, Site site) {
  WarpGroup* free_slot = nullptr;
  WarpGroup* joined = nullptr;
  for (u32 i = 0; i < warp.groups_used; ++i) {
    WarpGroup& group = warp.groups[i];
    if (group.mask == mask)
      joined = &group;
    else if (group.mask)
      check_divergence(group, mask, lane, operation, site);
    else
      free_slot = &group;
  }
  if (joined) return *joined;
  // There are never more groups than lanes: at least one lane waits in each group, and a lane waits in one group only.
  if (!free_slot) free_slot = &warp.groups[warp.groups_used++];
  free_slot->mask = mask;
  free_slot->arrived = 0;
  free_slot->operation = operation;
  free_slot->site = site;
  return *free_slot;
}

static void check_arrival(const Thread& self, u32 mask, WarpOperation operation, Site site) {
  if (!(mask >> self.lane & 1)) fail(site, "%s: the calling lane is not in mask %08x", name_of(operation), mask);
  if (mask & ~self.in_warp->live)
    fail(site, "%s: mask %08x names lanes that have ended or do not exist (live: %08x)", name_of(operation), mask,
         self.in_warp->live);
}

static void check_same_operation(const WarpGroup& group, WarpOperation operation, Site site) {
  if (group.operation == operation && (!is_aligned(operation) || group.site.line == site.line)) return;
  fail(site, "divergent warp collective: %s here, but %s at %s:%d", name_of(operation), name_of(group.operation),
       group.site.file, group.site.line);
}

void warp_collective(u32 mask, WarpOperation operation, void* lane_data, WarpAction action, Site site) {
  Thread& self = running_thread();
  check_arrival(self, mask, operation, site);
  WarpGroup& group = group_of(*self.in_warp, mask, self.lane, operation, site);
  check_same_operation(group, operation, site);
  group.lanes[self.lane] = lane_data;
  group.arrived |= 1u << self.lane;
  char* order = orders_memory(operation) ? &group.order[group.meetings & 1] : nullptr;
  if (order) release(order);
  if (group.arrived != mask) {
    suspend(State::kWarpCollective, site);
  } else {
    ++self.block->collectives;
    if (action) action(group.lanes, mask);
    ++group.meetings;
    group.mask = 0;
    for (u32 others = mask & ~(1u << self.lane); others; others &= others - 1)
      make_ready(self.in_warp->first[__builtin_ctz(others)]);
  }
  if (order) acquire(order);
}

void sync_warp(u32 mask, Site site) { warp_collective(mask, WarpOperation::kSyncWarp, nullptr, nullptr, site); }

void check_warp_at_exit(Thread& thread) {
  for (const WarpGroup& group : thread.in_warp->groups)
    if (group.mask >> thread.lane & 1)
      fail(group.site, "%s waits for lanes %08x, and this one of them has ended", name_of(group.operation), group.mask);
}

}  // namespace emulator
