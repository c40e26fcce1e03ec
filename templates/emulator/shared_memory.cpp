// The 32-bit shared window, with the addresses that shared_address() returns and ldmatrix and cp.async take.
#include "block.h"
#include "shared_window.h"

namespace emulator {

u32 shared_address(const void* pointer, Site site) {
  const Thread& self = running_thread();
  u64 offset = u64(static_cast<const unsigned char*>(pointer) - self.shared);
  if (offset > self.shared_bytes)
    fail(site, "the address of something that is not in shared memory was taken as shared");
  return u32(offset) + kWindowBase;
}

void* shared_pointer(u32 address, u32 bytes, u32 alignment, Site site) {
  const Thread& self = running_thread();
  u32 offset = address - kWindowBase;
  if (offset > self.shared_bytes || bytes > self.shared_bytes - offset)
    fail(site, "shared memory out of bounds: %u bytes at offset %d of %u", bytes, int(offset), self.shared_bytes);
  if (address % alignment)
    fail(site, "misaligned shared address: offset %u is not a multiple of %u", offset, alignment);
  return self.shared + offset;
}

}  // namespace emulator
