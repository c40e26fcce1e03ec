// wgmma's matrix descriptors: where the 16-byte chunks of an operand lie in shared memory.
#pragma once
#include "shared_window.h"

namespace emulator {

// A descriptor as the hardware decodes it (PTX ISA, "Matrix Descriptor Format"); lengths in bytes.
struct MatrixDescriptor {
  u32 start, leading, stride, swizzle_bytes;

  // Refuses what the hardware leaves undefined: bits that must be 0, and a start in the middle of a swizzle's pattern,
  // for which a base offset would be needed.
  static MatrixDescriptor decode(u64 bits, const char* operand, Site site);

  // Address of the chunk with the elements (row, 8 * part ... + 7), where the depth is contiguous: part is 0 or 1.
  u32 along_depth(u32 row, u32 part) const;
  // Address of the chunk with the elements (8 * group ... + 7, k), where rows are contiguous ("transposed").
  u32 along_rows(u32 group, u32 k) const;
};

}  // namespace emulator
