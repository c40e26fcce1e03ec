// Under TSan, memcpy and its like of the runtime's own: ThreadSanitizer intercepts the C library's whoever calls them,
// and would take the scheduler's bookkeeping for accesses by the CUDA thread that happens to run. Compilers call them
// on their own account, so avoiding them in the source is not enough.
#ifdef FLASHGEN_TSAN
#include <stddef.h>

// The symbol is hidden in this library, under a name of ours in C++, where the C library's declarations hold.
#define FLASHGEN_OWN(name) __attribute__((visibility("hidden"), used)) void* own_##name
// The empty statement keeps a compiler from recognising the loop and replacing it by a call of the very function.
#define FLASHGEN_KEEP_LOOP asm volatile("" ::: "memory")

namespace emulator {

FLASHGEN_OWN(memcpy)(void* to, const void* from, size_t bytes) asm("memcpy");
FLASHGEN_OWN(memmove)(void* to, const void* from, size_t bytes) asm("memmove");
FLASHGEN_OWN(memset)(void* to, int value, size_t bytes) asm("memset");

struct Word {
  unsigned long long bits;
} __attribute__((packed, may_alias));

void* own_memcpy(void* to, const void* from, size_t bytes) {
  size_t whole = bytes / sizeof(Word);
  for (size_t i = 0; i < whole; ++i) {
    static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
    FLASHGEN_KEEP_LOOP;
  }
  for (size_t i = whole * sizeof(Word); i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
    FLASHGEN_KEEP_LOOP;
  }
  return to;
}

void* own_memmove(void* to, const void* from, size_t bytes) {
  if (to <= from) return own_memcpy(to, from, bytes);
  for (size_t i = bytes; i > 0; --i) {
    static_cast<char*>(to)[i - 1] = static_cast<const char*>(from)[i - 1];
    FLASHGEN_KEEP_LOOP;
  }
  return to;
}

void* own_memset(void* to, int value, size_t bytes) {
  size_t whole = bytes / sizeof(Word);
  const Word word{0x0101010101010101ull * static_cast<unsigned char>(value)};
  for (size_t i = 0; i < whole; ++i) {
    static_cast<Word*>(to)[i] = word;
    FLASHGEN_KEEP_LOOP;
  }
  for (size_t i = whole * sizeof(Word); i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<char>(value);
    FLASHGEN_KEEP_LOOP;
  }
  return to;
}

}  // namespace emulator

#undef FLASHGEN_OWN
#undef FLASHGEN_KEEP_LOOP
#endif
