// cp.async: one thread's copies between their issue and the wait that promises them.
#pragma once
#include <vector>

#include "vector_types.h"
#include "interface.h"

namespace emulator {

// When a copy lands; mirrored by flashgen/runtime/schedule.py. All are legal on a GPU.
enum class CopyPolicy : u32 { kEarly, kLate, kRandom };

struct AsyncCopy {
  void* destination;
  const void* source;  // null: fill with zeros
  u32 bytes;
  u32 group;  // number of the group it is committed with
  bool landed;
  Site site;     // where it was issued
  void* caller;  // the same for the sanitizers: an address in the kernel
};

struct AsyncCopies {
  static constexpr u32 kOrders = 16;
  std::vector<AsyncCopy> issued;  // not waited for yet
  u32 open_group = 0;             // the group that the next commit closes
  u32 ordered_groups = 0;         // groups whose copies the thread has waited for
  char issue_order;
  char landing_order[kOrders];  // by group, in turn

  void reset() { issued.clear(), open_group = ordered_groups = 0; }
};

}  // namespace emulator
