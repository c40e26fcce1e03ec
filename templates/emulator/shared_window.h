// The 32-bit shared window, and the permutations of 16-byte chunks in it that TMA and wgmma know.
#pragma once
#include "vector_types.h"
#include "interface.h"

namespace emulator {

// Dynamic shared memory does not begin at 0, so that a forgotten base address is outside. 1024 keeps every alignment.
constexpr u32 kWindowBase = 1024;
constexpr u32 kChunkBytes = 16;

// Where a swizzle of 0 (none), 32, 64 or 128 bytes puts what an unswizzled layout has at `address`: the number of the
// 128-byte line, as far as the pattern goes, is XORed onto the number of the chunk.
inline u32 swizzled(u32 address, u32 swizzle_bytes) {
  u32 lines = swizzle_bytes < 32 ? 0 : swizzle_bytes / 16 - 1;  // 7, 3, 1
  return address ^ (address >> 7 & lines) << 4;
}

}  // namespace emulator
