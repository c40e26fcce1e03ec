// A fiber: a stack and a place on it to continue. One carries each CUDA thread; the worker's own stack is one more.
#pragma once
#include <stddef.h>

#include "sanitizers.h"

namespace emulator {

struct Fiber {
  void* stack_pointer = nullptr;  // where it continues; valid while it does not run
  char* stack = nullptr;          // lowest address; for a worker's own stack only known under ASan, once it was left
  size_t stack_bytes = 0;
  void* asan_fake_stack = nullptr;
  void* tsan = nullptr;
};

// Gives `fiber` a stack with a guard page below it, or returns false; free_stack gives it back.
bool allocate_stack(Fiber& fiber, size_t bytes);
void free_stack(Fiber& fiber);

// Makes `fiber` begin at `entry` when it is first switched to; entry must call fiber_entered() first and never return.
void prepare(Fiber& fiber, void (*entry)());
void fiber_entered(Fiber& fiber);

// Leaves `from` (for ever, if `finished`) and continues `to`.
void switch_fiber(Fiber& from, Fiber& to, bool finished = false);

// The worker's own stack as a fiber.
void adopt_running_stack(Fiber& fiber);

}  // namespace emulator
