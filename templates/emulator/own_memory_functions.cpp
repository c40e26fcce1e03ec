// Under TSan, the runtime's own memcpy, memset and the like. ThreadSanitizer intercepts those of the C library for all
// callers and would attribute the scheduler's bookkeeping to the running CUDA thread, as races with accesses of other
// threads to the same memory. Avoiding them in the source is not enough, since compilers insert calls of them.
#ifdef FLASHGEN_TSAN
#include <stddef.h>

// The symbol is hidden in this library and has another name in C++, where the C library declares the original.
#define FLASHGEN_OWN(type, name) __attribute__((visibility("hidden"), used)) type own_##name
// The empty statement keeps compilers from recognising the loop and replacing it by a call of the function itself.
#define FLASHGEN_KEEP_LOOP asm volatile("" ::: "memory")

namespace emulator {

FLASHGEN_OWN(void*, memcpy)(void* to, const void* from, size_t bytes) asm("memcpy");
FLASHGEN_OWN(void*, memmove)(void* to, const void* from, size_t bytes) asm("memmove");
FLASHGEN_OWN(void*, memset)(void* to, int value, size_t bytes) asm("memset");
FLASHGEN_OWN(int, memcmp)(const void* one, const void* other, size_t bytes) asm("memcmp");

struct Word {
  unsigned long long bits;
} __attribute__((packed, may_alias));

void* own_memcpy(void* to, const void* from, size_t bytes) {
  size_t words = bytes / sizeof(Word);
  for (size_t i = 0; i < words; ++i) {
    static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
    FLASHGEN_KEEP_LOOP;
  }
  for (size_t i = words * sizeof(Word); i < bytes; ++i) {
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
  size_t words = bytes / sizeof(Word);
  const Word word{0x0101010101010101ull * static_cast<unsigned char>(value)};
  for (size_t i = 0; i < words; ++i) {
    static_cast<Word*>(to)[i] = word;
    FLASHGEN_KEEP_LOOP;
  }
  for (size_t i = words * sizeof(Word); i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<char>(value);
    FLASHGEN_KEEP_LOOP;
  }
  return to;
}

int own_memcmp(const void* one, const void* other, size_t bytes) {
  size_t at = 0;
  while (at + sizeof(Word) <= bytes) {
    if (reinterpret_cast<const Word*>(static_cast<const char*>(one) + at)->bits !=
        reinterpret_cast<const Word*>(static_cast<const char*>(other) + at)->bits)
      break;
    at += sizeof(Word);
    FLASHGEN_KEEP_LOOP;
  }
  for (; at < bytes; ++at) {
    int difference = static_cast<const unsigned char*>(one)[at] - static_cast<const unsigned char*>(other)[at];
    if (difference != 0) return difference;
    FLASHGEN_KEEP_LOOP;
  }
  return 0;
}

}  // namespace emulator

#undef FLASHGEN_OWN
#undef FLASHGEN_KEEP_LOOP
#endif
