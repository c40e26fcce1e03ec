// The 32-bit shared window, and the swizzles of its 16-byte chunks that TMA and wgmma support.
#pragma once
#include "vector_types.h"
#include "interface.h"

namespace emulator {

// Dynamic shared memory does not begin at 0, so that an address without the base is out of bounds. 1024 keeps
// alignments.
constexpr u32 kWindowBase = 1024;
constexpr u32 kChunkBytes = 16;

// Returns the address to which a swizzle of 0 (none), 32, 64 or 128 bytes maps `address`: the number of the chunk is
// XORed with the number of the 128-byte line within the pattern.
inline u32 swizzled(u32 address, u32 swizzle_bytes) {
  u32 lines = swizzle_bytes < 32 ? 0 : swizzle_bytes / 16 - 1;  // 7, 3, 1
  return address ^ (address >> 7 & lines) << 4;
}

}  // namespace emulator
