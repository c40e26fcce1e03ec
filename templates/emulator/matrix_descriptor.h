// Matrix descriptors of wgmma: the addresses of an operand's 16-byte chunks in shared memory.
#pragma once
#include "shared_window.h"

namespace emulator {

// A descriptor as the hardware decodes it (PTX ISA, "Matrix Descriptor Format"); lengths in bytes.
struct MatrixDescriptor {
  u32 start, leading, stride, swizzle_bytes;

  // Refuses what is undefined in hardware: bits that must be 0, and a start within the pattern of a swizzle, which
  // would need a base offset.
  static MatrixDescriptor decode(u64 bits, const char* operand, Site site);

  // Returns the address of the chunk with the elements (row, 8 * part ... + 7) if the depth is contiguous. part: 0 or
  // 1.
  u32 along_depth(u32 row, u32 part) const;
  // Returns the address of the chunk with the elements (8 * group ... + 7, k) if rows are contiguous ("transposed").
  u32 along_rows(u32 group, u32 k) const;
};

}  // namespace emulator
