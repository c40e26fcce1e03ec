// The operands of a wgmma: tiles of shared memory by their descriptors, or fragments of a in registers.
#include <string.h>

#include "block.h"
#include "matrix_descriptor.h"

namespace emulator {

// Calls visit(address, index, step) for each 16-byte chunk of rows [begin, end): its address, the index of its first
// element in `tile`, the rows of which are 16 deep, and the distance of its elements there.
template <class Visit>
static void for_each_chunk(const MatrixDescriptor& descriptor, bool transposed, u32 begin, u32 end, Visit visit) {
  if (!transposed) {
    for (u32 row = begin; row < end; ++row)
      for (u32 part = 0; part < 2; ++part) visit(descriptor.along_depth(row, part), row * 16 + part * 8, 1u);
    return;
  }
  for (u32 group = begin / 8; group < end / 8; ++group)
    for (u32 k = 0; k < 16; ++k) visit(descriptor.along_rows(group, k), group * 8 * 16 + k, 16u);
}

static void read_tile(const MatrixDescriptor& descriptor, bool transposed, u32 begin, u32 end, u16* tile, Site site) {
  for_each_chunk(descriptor, transposed, begin, end, [&](u32 address, u32 index, u32 step) {
    const u16* chunk = static_cast<const u16*>(shared_pointer(address, kChunkBytes, kChunkBytes, site));
    for (u32 i = 0; i < 8; ++i) tile[index + i * step] = chunk[i];
  });
}

// Notes that the product may read these rows from now on, for this thread's warp. The rows of b are noted once.
static void begin_operand(Thread& self, Warpgroup& group, MatrixProduct& product, Claim& claim, u64 bits,
                          bool transposed, u32 begin, u32 end, u16* tile, const char* operand) {
  Block& block = *self.block;
  MatrixDescriptor descriptor = MatrixDescriptor::decode(bits, operand, product.site);
  claim.what = "wgmma";
  claim.site = product.site;
  claim.writes = false;
  claim.chunks.clear(self.shared_bytes);
  for_each_chunk(descriptor, transposed, begin, end, [&](u32 address, u32, u32) {
    shared_pointer(address, kChunkBytes, kChunkBytes, product.site);
    claim.chunks.add(address - kWindowBase, kChunkBytes);
  });
  block.async_proxy.begin(claim);
  block.async_proxy.check_visible(claim);
  read_tile(descriptor, transposed, begin, end, tile, product.site);
  if (!kThreadSanitizer) return;
  release(&self.matrix.issue_order);
  Engine& of_group = group.operand_engines[product.group % Warpgroup::kEngines];
  AsEngine engine(created(block, of_group, "wgmma (operands in shared memory)"));
  acquire(&self.matrix.issue_order);
  for_each_chunk(descriptor, transposed, begin, end, [&](u32 address, u32, u32) {
    note_read(self.shared + (address - kWindowBase), kChunkBytes, product.caller);
  });
  release(&group.group_order[rank_of(self) / 32][product.group % Warpgroup::kOrders]);
}

static void check_unchanged(const MatrixProduct& product, u64 bits, bool transposed, u32 rows, const u16* tile,
                            const char* operand, u16* now) {
  MatrixDescriptor descriptor = MatrixDescriptor::decode(bits, operand, product.site);
  read_tile(descriptor, transposed, 0, rows, now, product.site);
  if (memcmp(now, tile, rows * 16 * sizeof(u16)) != 0)
    fail(product.site, "shared memory with %s of this wgmma was overwritten before a wgmma_wait for it", operand);
}

void check_operands_unchanged(const MatrixProduct& product, ProductWorkspace& workspace) {
  const WarpgroupProduct& what = product.what;
  check_unchanged(product, what.b, what.transposed_b, u32(what.columns), product.b[0], "b", workspace.tile);
  if (!what.a_registers) check_unchanged(product, what.a, false, 64, product.a[0], "a", workspace.tile);
}

void take_a_registers(MatrixProduct& product, u32 rank, const u32* a) {
  for (u32 part = 0; part < 8; ++part) {  // as in mma.m16n8k16: rows g, g + 8, then columns + 8
    u32 word = part / 2, row = rank / 32 * 16 + rank % 32 / 4 + word % 2 * 8;
    product.a[row][rank % 4 * 2 + word / 2 * 8 + part % 2] = u16(a[word] >> part % 2 * 16);
  }
}

void begin_operands(Thread& self, Warpgroup& group, MatrixProduct& product) {
  const WarpgroupProduct& what = product.what;
  u32 warp = rank_of(self) / 32;
  if (product.warps == 0)
    begin_operand(self, group, product, product.b_tile, what.b, what.transposed_b, 0, u32(what.columns), product.b[0],
                  "b");
  if (!(product.warps >> warp & 1) && !what.a_registers)
    begin_operand(self, group, product, product.a_rows[warp], what.a, false, 16 * warp, 16 * warp + 16, product.a[0],
                  "a");
  product.warps |= 1u << warp;
}

}  // namespace emulator
