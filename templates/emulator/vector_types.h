// CUDA's small vector types with CUDA's alignments, and their make_ functions.
#pragma once

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
};

#define FLASHGEN_VECTOR_TYPES(scalar, name)                                                                          \
  struct __attribute__((aligned(2 * sizeof(scalar)))) name##2 { scalar x, y; };                                      \
  struct __attribute__((aligned(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)))) name##4 { scalar x, y, z, w; }; \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                               \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

FLASHGEN_VECTOR_TYPES(signed char, char)
FLASHGEN_VECTOR_TYPES(unsigned char, uchar)
FLASHGEN_VECTOR_TYPES(short, short)
FLASHGEN_VECTOR_TYPES(unsigned short, ushort)
FLASHGEN_VECTOR_TYPES(int, int)
FLASHGEN_VECTOR_TYPES(unsigned, uint)
FLASHGEN_VECTOR_TYPES(float, float)
FLASHGEN_VECTOR_TYPES(long long, longlong)
FLASHGEN_VECTOR_TYPES(unsigned long long, ulonglong)
FLASHGEN_VECTOR_TYPES(double, double)
#undef FLASHGEN_VECTOR_TYPES
