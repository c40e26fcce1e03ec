// The annotations for AddressSanitizer and ThreadSanitizer, which do nothing in plain builds. No other file uses the
// interfaces of sanitizers.
//
// Under ASan the runtime itself is instrumented. Under TSan (-DFLASHGEN_TSAN) it is not, and uses the ThreadSanitizer
// of the program that loads it: it moves data between CUDA threads internally, and annotates the accesses and the order
// that a GPU would have.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define FLASHGEN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FLASHGEN_ASAN 1
#endif
#endif

#ifdef FLASHGEN_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef FLASHGEN_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
unsigned short __tsan_atomic16_fetch_or(volatile unsigned short* address, unsigned short value, int order);
void __tsan_func_entry(void* caller);
void __tsan_func_exit();
}
#endif

namespace emulator {

#ifdef FLASHGEN_TSAN
constexpr bool kThreadSanitizer = true;
constexpr unsigned kNoSynchronisation = 1;  // a switch of fibers orders nothing by itself
#else
constexpr bool kThreadSanitizer = false;
#endif

// Happens-before: everything before release(x) is visible to everything after a later acquire(x).
inline void acquire(void* address) {
#ifdef FLASHGEN_TSAN
  __tsan_acquire(address);
#endif
  (void)address;
}

inline void release(void* address) {
#ifdef FLASHGEN_TSAN
  __tsan_release(address);
#endif
  (void)address;
}

// Notes accesses that the runtime makes for the kernel. `caller` is the address of the call in the kernel, so that
// reports name a line of the emitted source.
inline void note_read(const void* address, unsigned long bytes, void* caller) {
#if defined(FLASHGEN_TSAN)
  __tsan_func_entry(caller);
  __tsan_read_range(const_cast<void*>(address), bytes);
  __tsan_func_exit();
#elif defined(FLASHGEN_ASAN)
  if (void* bad = __asan_region_is_poisoned(const_cast<void*>(address), bytes)) (void)*static_cast<volatile char*>(bad);
#endif
  (void)address, (void)bytes, (void)caller;
}

inline void note_write(void* address, unsigned long bytes, void* caller) {
#if defined(FLASHGEN_TSAN)
  __tsan_func_entry(caller);
  __tsan_write_range(address, bytes);
  __tsan_func_exit();
#elif defined(FLASHGEN_ASAN)
  if (void* bad = __asan_region_is_poisoned(address, bytes)) *static_cast<volatile char*>(bad) = 0;
#endif
  (void)address, (void)bytes, (void)caller;
}

// Notes atomic updates of 16-bit numbers, or of wider ones half by half.
inline void note_atomics(void* address, unsigned long bytes, void* caller) {
#if defined(FLASHGEN_TSAN)
  __tsan_func_entry(caller);
  for (unsigned long at = 0; at < bytes; at += 2)
    __tsan_atomic16_fetch_or(reinterpret_cast<unsigned short*>(static_cast<char*>(address) + at), 0, __ATOMIC_RELAXED);
  __tsan_func_exit();
#else
  note_write(address, bytes, caller);
#endif
}

// Marks variables of the kernel that temporarily hold no value, so that ASan reports accesses to them.
inline void forbid_access(void* address, unsigned long bytes) {
#ifdef FLASHGEN_ASAN
  __asan_poison_memory_region(address, bytes);
#endif
  (void)address, (void)bytes;
}

inline void allow_access(void* address, unsigned long bytes) {
#ifdef FLASHGEN_ASAN
  __asan_unpoison_memory_region(address, bytes);
#endif
  (void)address, (void)bytes;
}

// Asynchronous hardware that acts for a CUDA thread, as a thread of its own to ThreadSanitizer. It has no stack: while
// an AsEngine exists, the running code counts as the engine.
struct Engine {
  void* tsan = nullptr;
  void create(const char* name) {
#ifdef FLASHGEN_TSAN
    tsan = __tsan_create_fiber(0);
    __tsan_set_fiber_name(tsan, name);
#endif
    (void)name;
  }
  void destroy() {
#ifdef FLASHGEN_TSAN
    if (tsan) __tsan_destroy_fiber(tsan);
#endif
    tsan = nullptr;
  }
};

class AsEngine {
 public:
  explicit AsEngine(const Engine& engine) {
#ifdef FLASHGEN_TSAN
    self_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(engine.tsan, kNoSynchronisation);
#endif
    (void)engine;
  }
  ~AsEngine() {
#ifdef FLASHGEN_TSAN
    __tsan_switch_to_fiber(self_, kNoSynchronisation);
#endif
  }
  AsEngine(const AsEngine&) = delete;
  AsEngine& operator=(const AsEngine&) = delete;

 private:
  void* self_ = nullptr;
};

}  // namespace emulator
