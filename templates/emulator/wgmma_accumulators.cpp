// The registers in which wgmmas in flight accumulate. The runtime holds their values until their thread has waited.
#include <string.h>

#include "block.h"

namespace emulator {

static u32 accumulator_row(u32 rank, int i) { return rank / 32 * 16 + rank % 32 / 4 + (i >> 1 & 1) * 8; }
static u32 accumulator_column(u32 rank, int i) { return u32(i >> 2) * 8 + rank % 4 * 2 + (i & 1); }

static void take_registers(Accumulator& accumulator, u32 rank, float* d) {
  int count = accumulator.columns / 2;
  for (int i = 0; i < count; ++i)
    accumulator.values[accumulator_row(rank, i) * accumulator.columns + accumulator_column(rank, i)] = d[i];
  memset(d, 0xff, count * sizeof(float));
  forbid_access(d, count * sizeof(float));
}

static void give_registers(const Accumulator& accumulator, u32 rank) {
  float* d = accumulator.registers[rank];
  int count = accumulator.columns / 2;
  allow_access(d, count * sizeof(float));
  for (int i = 0; i < count; ++i)
    d[i] = accumulator.values[accumulator_row(rank, i) * accumulator.columns + accumulator_column(rank, i)];
}

// Returns the accumulator of this thread that is in flight in these registers, or null.
static Accumulator* accumulator_in_flight(Warpgroup& group, u32 rank, float* d, int columns, Site site) {
  for (Accumulator* accumulator : group.accumulators) {
    float* other = accumulator->registers[rank];
    if (!other || d + columns / 2 <= other || other + accumulator->columns / 2 <= d) continue;
    if (other == d && accumulator->columns == columns) return accumulator;
    fail(site, "wgmma accumulates in registers of which a wgmma of another shape, in flight, has some");
  }
  return nullptr;
}

// Adds these registers of the thread to the accumulator of the product. They hold NaN until the thread has waited. Returns
// the group of the last product in flight that accumulates in them, or kNoGroup.
u64 hold_accumulator(Warpgroup& group, Thread& self, MatrixProduct& product, float* d) {
  u32 rank = rank_of(self);
  int columns = product.what.columns;
  Accumulator* held = accumulator_in_flight(group, rank, d, columns, product.site);
  bool is_first = product.arrived == 0;
  if (is_first) product.accumulator = held;
  if (is_first && !held) {
    Accumulator& fresh = self.block->accumulator_pool.take();
    fresh.columns = columns;
    fresh.holders = 0;
    memset(fresh.registers, 0, sizeof fresh.registers);
    fresh.values.resize(64 * size_t(columns));
    group.accumulators.push_back(&fresh);
    product.accumulator = &fresh;
  }
  Accumulator& accumulator = *product.accumulator;
  if (held && held != &accumulator)
    fail(product.site, "the threads of the warpgroup accumulate in different registers");
  if (!held) {
    accumulator.registers[rank] = d;
    ++accumulator.holders;
    take_registers(accumulator, rank, d);
  }
  u64 earlier = held ? accumulator.last_group[rank] : kNoGroup;
  accumulator.last_group[rank] = product.group;
  return earlier;
}

void release_accumulators(Block& block, Warpgroup& group, u32 rank, u64 complete) {
  size_t kept = 0;
  for (Accumulator* accumulator : group.accumulators) {
    if (accumulator->registers[rank] && accumulator->last_group[rank] < complete) {
      give_registers(*accumulator, rank);
      accumulator->registers[rank] = nullptr;
      --accumulator->holders;
    }
    if (accumulator->holders)
      group.accumulators[kept++] = accumulator;
    else
      block.accumulator_pool.give_back(*accumulator);
  }
  group.accumulators.resize(kept);
}

}  // namespace emulator
