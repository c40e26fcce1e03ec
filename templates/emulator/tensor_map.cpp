#include "tensor_map.h"

#include "block.h"

namespace emulator {

const TensorMapLayout& checked_map(const void* map, Site site) {
  if (u64(map) % 64) fail(site, "a tensor map must be 64-byte aligned: first in the kernel's argument struct");
  const TensorMapLayout& layout = *static_cast<const TensorMapLayout*>(map);
  if (layout.magic != TensorMapLayout::kMagic)
    fail(site, "this is no tensor map of the emulator (flashgen.runtime.tensor_maps.emulated_map makes them)");
  return layout;
}

TensorBox tensor_box(const void* map, int rank, const int* start, Site site) {
  TensorBox box{};
  box.map = checked_map(map, site);
  if (box.map.rank != u32(rank)) fail(site, "a %d-dimensional copy with a map of %u dimensions", rank, box.map.rank);
  if (u64(box.map.base) % 16) fail(site, "the tensor at %p is not 16-byte aligned", static_cast<void*>(box.map.base));
  u32 element = element_bytes(box.map.element);
  box.rows = 1;
  for (int i = 1; i < rank; ++i) box.rows *= box.map.box[i];
  for (int i = 0; i < rank; ++i) box.start[i] = start[i];
  box.row_bytes = box.map.box[0] * element;
  long long first = start[0] < 0 ? -(long long)start[0] : 0;
  long long past = (long long)box.map.size[0] - start[0];
  if (past > box.map.box[0]) past = box.map.box[0];
  if (first > past) first = past = 0;
  box.first_byte = u32(first) * element;
  box.past_bytes = u32(past) * element;
  return box;
}

TensorBox run_box(const void* begin, u32 bytes, Site site) {
  constexpr u32 kRow = 16;
  if (u64(begin) % kRow || bytes % kRow || !bytes || bytes / kRow > 0xffff)
    fail(site, "a bulk copy of %u bytes from %p: both must be multiples of 16", bytes, begin);
  TensorBox box{};
  box.map.base = static_cast<char*>(const_cast<void*>(begin));
  box.map.rank = 2;
  box.rows = box.map.size[1] = box.map.box[1] = u16(bytes / kRow);
  box.map.stride[0] = box.row_bytes = box.past_bytes = kRow;
  return box;
}

char* TensorBox::row_address(u32 row) const {
  if (first_byte == past_bytes) return nullptr;
  char* address = map.base - map.shift + (long long)start[0] * element_bytes(map.element) + first_byte;
  for (u32 i = 1; i < map.rank; ++i) {
    long long at = start[i] + (long long)(row % map.box[i]);
    row /= map.box[i];
    if (at < 0 || at >= map.size[i]) return nullptr;
    address += at * map.stride[i - 1];
  }
  return address;
}

}  // namespace emulator
