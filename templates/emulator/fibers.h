// A fiber: a stack and the position at which to continue. Each CUDA thread runs on one. The worker's own stack is
// another.
#pragma once
#include <stddef.h>

#include "sanitizers.h"

namespace emulator {

struct Fiber {
  void* stack_pointer = nullptr;  // position at which it continues; valid while it does not run
  char* stack = nullptr;          // lowest address; of a worker's own stack known under ASan only, after a switch
  size_t stack_bytes = 0;
  void* asan_fake_stack = nullptr;
  void* tsan = nullptr;
};

// Allocates a stack with a guard page below it, or returns false. free_stack frees it.
bool allocate_stack(Fiber& fiber, size_t bytes);
void free_stack(Fiber& fiber);

// Makes `fiber` begin at `entry` at the first switch to it. `entry` must call fiber_entered() first and never return.
void prepare(Fiber& fiber, void (*entry)());
void fiber_entered(Fiber& fiber);

// Leaves `from` (permanently if `finished`) and continues `to`.
void switch_fiber(Fiber& from, Fiber& to, bool finished = false);

// Makes a fiber of the worker's own stack.
void adopt_running_stack(Fiber& fiber);

}  // namespace emulator
