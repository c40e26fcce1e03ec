// Under TSan, memcpy and its like of the runtime's own: ThreadSanitizer intercepts the C library's whoever calls them,
// and would take the scheduler's bookkeeping for accesses by the CUDA thread that happens to run, which race with what
// another did to the same memory - with the mmap it comes from, to begin with. Compilers call them on their own
// account, so avoiding them in the source is not enough.
#ifdef FLASHGEN_TSAN
#include <stddef.h>

// The symbol is hidden in this library, under a name of ours in C++, where the C library's declarations hold.
#define FLASHGEN_OWN(type, name) __attribute__((visibility("hidden"), used)) type own_##name
// The empty statement keeps a compiler from recognising the loop and replacing it by a call of the very function.
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
