#include "matrix_descriptor.h"

namespace emulator {

static u32 length_field(u64 bits, int shift) { return u32(bits >> shift & 0x3fff) << 4; }

MatrixDescriptor MatrixDescriptor::decode(u64 bits, const char* operand, Site site) {
  constexpr u64 kUnusedBits = 0x3ff1c000c000c000ull;  // 14-15, 30-31, 46-48, 52-61
  constexpr u32 kSwizzles[] = {0, 128, 64, 32};
  if (bits & kUnusedBits)
    fail(site, "the descriptor of %s, %#018llx, has bits set outside of its fields", operand, bits);
  MatrixDescriptor descriptor{length_field(bits, 0), length_field(bits, 16), length_field(bits, 32),
                              kSwizzles[bits >> 62]};
  if (u32 base_offset = u32(bits >> 49 & 7))
    fail(site, "the descriptor of %s has base offset %u; only 0 is emulated", operand, base_offset);
  u32 lines = descriptor.swizzle_bytes ? descriptor.swizzle_bytes / 16 - 1 : 0;
  if (descriptor.start >> 7 & lines)
    fail(site,
         "the descriptor of %s starts at offset %d of shared memory, within the pattern of its %u-byte swizzle: with "
         "base offset 0, its 128-byte line must be a multiple of %u",
         operand, int(descriptor.start - kWindowBase), descriptor.swizzle_bytes, lines + 1);
  return descriptor;
}

u32 MatrixDescriptor::along_depth(u32 row, u32 part) const {
  u32 pitch = swizzle_bytes ? swizzle_bytes : kChunkBytes;
  u32 offset = row % 8 * pitch + row / 8 * stride + part * (swizzle_bytes ? kChunkBytes : leading);
  return swizzled(start + offset, swizzle_bytes);
}

u32 MatrixDescriptor::along_rows(u32 group, u32 k) const {
  if (!swizzle_bytes) return start + group * stride + k % 8 * kChunkBytes + k / 8 * leading;
  u32 groups = swizzle_bytes / kChunkBytes;  // in a panel
  u32 offset = group % groups * kChunkBytes + group / groups * leading + k % 8 * swizzle_bytes + k / 8 * stride;
  return swizzled(start + offset, swizzle_bytes);
}

}  // namespace emulator
