// CUDA's integer intrinsics, and min and max with CUDA's overloads.
#pragma once

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll((unsigned long long)value) : 64; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline unsigned __brev(unsigned value) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1u) << (31 - bit);
  return result;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Selects four of eight bytes, 0 to 3 from x and 4 to 7 from y. Unlike in prmt, the top bit of a nibble is ignored.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned nibble = selector >> (4 * i) & 15;
    unsigned byte = unsigned(bytes >> (8 * (nibble & 7))) & 255;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

// int with unsigned compares as unsigned, as in CUDA.
#define FLASHGEN_MIN_MAX(type, a_type, b_type)                        \
  inline constexpr type min(a_type first, b_type second) {            \
    type a = static_cast<type>(first), b = static_cast<type>(second); \
    return a < b ? a : b;                                             \
  }                                                                   \
  inline constexpr type max(a_type first, b_type second) {            \
    type a = static_cast<type>(first), b = static_cast<type>(second); \
    return a < b ? b : a;                                             \
  }
FLASHGEN_MIN_MAX(int, int, int)
FLASHGEN_MIN_MAX(unsigned, unsigned, unsigned)
FLASHGEN_MIN_MAX(unsigned, int, unsigned)
FLASHGEN_MIN_MAX(unsigned, unsigned, int)
FLASHGEN_MIN_MAX(long, long, long)
FLASHGEN_MIN_MAX(long long, long long, long long)
FLASHGEN_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef FLASHGEN_MIN_MAX

inline constexpr int abs(int value) { return value < 0 ? -value : value; }
inline constexpr long long llabs(long long value) { return value < 0 ? -value : value; }
inline constexpr long long abs(long long value) { return value < 0 ? -value : value; }
