// cp.async: the copies of one thread between their issue and the wait that guarantees their completion.
#pragma once
#include <vector>

#include "vector_types.h"
#include "interface.h"

namespace emulator {

// When a copy completes. All are legal on a GPU. Keep in step with flashgen/runtime/schedule.py.
enum class CopyPolicy : u32 { kEarly, kLate, kRandom };

struct AsyncCopy {
  void* destination;
  const void* source;  // null to fill with zeros
  u32 bytes;
  u32 group;  // number of the group with which it is committed
  bool landed;
  Site site;     // line of the issue
  void* caller;  // address of the issue in the kernel, for the sanitizers
};

struct AsyncCopies {
  static constexpr u32 kOrders = 16;
  std::vector<AsyncCopy> issued;  // not waited for yet
  u32 open_group = 0;             // group that the next commit closes
  u32 ordered_groups = 0;         // groups for which the thread has waited
  char issue_order;
  char landing_order[kOrders];  // by group, cyclically

  void reset() { issued.clear(), open_group = ordered_groups = 0; }
};

}  // namespace emulator
