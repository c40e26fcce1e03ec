// Tensor maps as the emulator's launches encode them, in the 128 bytes of a CUtensorMap, and the boxes they describe.
#pragma once
#include "shared_window.h"

namespace emulator {

enum class TensorElement : u32 { kF16, kBf16, kF32 };

// Keep in step with flashgen/runtime/tensor_maps.py.
struct TensorMapLayout {
  static constexpr u64 kMagic = 0x3150414d54455247ull;
  char* base;
  u64 magic;
  u32 rank;  // 1 to 5; dimension 0 is contiguous
  TensorElement element;
  u32 swizzle_bytes;  // 0, 32, 64 or 128
  u32 reserved;
  u32 size[5];
  u16 box[5];
  u16 reserved_too;
  long long stride[4];  // in bytes, of dimensions 1 to 4
  long long shift;      // bytes from the beginning of the map to `base`
  u64 unused[3];
};
static_assert(sizeof(TensorMapLayout) == 128, "as large as a CUtensorMap");

// A box at given coordinates, which may be partly outside of the tensor.
struct TensorBox {
  TensorMapLayout map;
  int start[5];
  u32 rows, row_bytes;         // rows of shared memory: all but the first dimension
  u32 first_byte, past_bytes;  // range of the bytes of each row that are inside of the tensor

  u32 bytes() const { return rows * row_bytes; }
  // Returns the address of byte `first_byte` of a row in the tensor, or null if the row is outside of the tensor.
  char* row_address(u32 row) const;
};

// Checks what TMA checks: that the map has this rank, and that the box fits shared memory.
TensorBox tensor_box(const void* map, int rank, const int* start, Site site);
// Represents contiguous bytes as a box with rows of 16 bytes.
TensorBox run_box(const void* begin, u32 bytes, Site site);
const TensorMapLayout& checked_map(const void* map, Site site);

inline u32 element_bytes(TensorElement element) { return element == TensorElement::kF32 ? 4 : 2; }

}  // namespace emulator
