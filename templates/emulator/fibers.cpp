// Fibers: stacks, the switch between them in assembly, and the annotations for sanitizers.
#include "fibers.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Pushes the callee-saved registers, stores the stack pointer in *from, loads `to` and pops. ucontext would do the
// same, but with two system calls per switch for the signal mask.
extern "C" void flashgen_switch_stack(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl flashgen_switch_stack
.hidden flashgen_switch_stack
.type flashgen_switch_stack,@function
flashgen_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size flashgen_switch_stack, .-flashgen_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl flashgen_switch_stack
.hidden flashgen_switch_stack
.type flashgen_switch_stack,@function
flashgen_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size flashgen_switch_stack, .-flashgen_switch_stack
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

namespace emulator {

bool allocate_stack(Fiber& fiber, size_t bytes) {
  size_t guard = size_t(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, guard + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  if (mprotect(memory, guard, PROT_NONE) != 0) {
    munmap(memory, guard + bytes);
    return false;
  }
  fiber.stack = static_cast<char*>(memory) + guard;
  fiber.stack_bytes = bytes;
  return true;
}

void free_stack(Fiber& fiber) {
  size_t guard = size_t(sysconf(_SC_PAGESIZE));
  munmap(fiber.stack - guard, guard + fiber.stack_bytes);
}

void prepare(Fiber& fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes);
#ifdef FLASHGEN_ASAN
  // The previous thread left red zones in the frames from which it never returned.
  char* stopped = static_cast<char*>(fiber.stack_pointer);
  if (stopped) __asan_unpoison_memory_region(stopped, size_t(reinterpret_cast<char*>(top) - stopped));
#endif
#if defined(__x86_64__)
  // From the top: no return address, at which a debugger's backtrace ends and which aligns `entry` as a call would;
  // `entry` for the jump; six registers.
  top -= 8;
  memset(top, 0, 8 * sizeof(void*));
  top[6] = reinterpret_cast<void*>(entry);
#else
  top -= 20;
  memset(top, 0, 20 * sizeof(void*));
  top[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  fiber.stack_pointer = top;
  fiber.asan_fake_stack = nullptr;
}

// The fiber that this worker left last. The next one learns the bounds of its stack from ASan.
static __thread Fiber* left_last __attribute__((tls_model("initial-exec")));

void fiber_entered(Fiber& fiber) {
#ifdef FLASHGEN_ASAN
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fiber.asan_fake_stack, &stack, &bytes);
  if (!left_last->stack) {
    left_last->stack = static_cast<char*>(const_cast<void*>(stack));
    left_last->stack_bytes = bytes;
  }
#endif
  (void)fiber;
}

void switch_fiber(Fiber& from, Fiber& to, bool finished) {
  left_last = &from;
#ifdef FLASHGEN_TSAN
  __tsan_switch_to_fiber(to.tsan, kNoSynchronisation);
#endif
#ifdef FLASHGEN_ASAN
  __sanitizer_start_switch_fiber(finished ? nullptr : &from.asan_fake_stack, to.stack, to.stack_bytes);
#endif
  (void)finished;
  flashgen_switch_stack(&from.stack_pointer, to.stack_pointer);
  fiber_entered(from);
}

void adopt_running_stack(Fiber& fiber) {
#ifdef FLASHGEN_TSAN
  fiber.tsan = __tsan_get_current_fiber();
#endif
  (void)fiber;
}

}  // namespace emulator
