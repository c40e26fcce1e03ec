// wgmma: issue, groups and waits. The four warps need not be in step: a product may be performed once all have issued
// it.
#include <stdio.h>

#include "block.h"

namespace emulator {

Warpgroup& warpgroup_of(Thread& self, Site site) {
  u32 number = self.linear / kWarpgroupThreads;
  if (self.block->threads.size() < (number + 1) * kWarpgroupThreads)
    fail(site, "a warpgroup is 4 whole warps, aligned to 4; this one has %zu threads",
         self.block->threads.size() - number * kWarpgroupThreads);
  return self.block->warpgroups[number];
}

// ---- the engine ----

static bool are_done(const Warpgroup& group, u64 groups) {
  for (const MatrixProduct* product : group.products) {
    if (product->group >= groups) return true;
    if (!product->done) return false;
  }
  return true;
}

static void wake_waiting(Block& block, u32 number) {
  for (u32 i = 0; i < kWarpgroupThreads; ++i) {
    Thread& thread = block.threads[number * kWarpgroupThreads + i];
    if (thread.state == State::kProducts && are_done(block.warpgroups[number], thread.matrix.awaited_groups))
      make_ready(thread);
  }
}

// Performs the oldest pending product. Returns false if there is none, or if not all threads have issued it.
static bool perform_product(Block& block, u32 number) {
  for (MatrixProduct* product : block.warpgroups[number].products) {
    if (product->done) continue;
    if (product->arrived < kWarpgroupThreads) return false;
    Blame issuer(*product->first);
    check_operands_unchanged(*product, block.workspace);
    multiply_tiles(*product, block.workspace);
    product->done = true;
    --block.products_in_flight;
    wake_waiting(block, number);
    return true;
  }
  return false;
}

static bool is_awaited(const Block& block, u32 number) {
  for (u32 i = 0; i < kWarpgroupThreads; ++i)
    if (block.threads[number * kWarpgroupThreads + i].state == State::kProducts) return true;
  return false;
}

bool perform_awaited_product(Block& block) {
  for (u32 number = 0; number < block.whole_warpgroups(); ++number) {
    if (is_awaited(block, number) && perform_product(block, number)) return true;
  }
  return false;
}

bool perform_random_product(Block& block) {
  u32 count = block.whole_warpgroups(), first = block.random.below(count);
  for (u32 i = 0; i < count; ++i) {
    if (perform_product(block, (first + i) % count)) return true;
  }
  return false;
}

// ---- issue ----

static void check_agreement(const MatrixProduct& product, const WarpgroupProduct& what, u64 group, Site site) {
  const WarpgroupProduct& first = product.what;
  if (site.line != product.site.line || what.columns != first.columns || what.element != first.element ||
      what.transposed_b != first.transposed_b || !what.a_registers != !first.a_registers)
    fail(site, "the threads of the warpgroup issue different wgmmas: others are at %s:%d", product.site.file,
         product.site.line);
  if (what.b != first.b || (!what.a_registers && what.a != first.a))
    fail(site, "the warpgroup's threads disagree in the descriptors of a wgmma: a %#llx and %#llx, b %#llx and %#llx",
         what.a, first.a, what.b, first.b);
  if (what.accumulate != first.accumulate) fail(site, "the threads of the warpgroup disagree in `accumulate`");
  if (group != product.group) fail(site, "the threads of the warpgroup have committed different groups of wgmmas");
}

static MatrixProduct& joined_product(Thread& self, Warpgroup& group, const WarpgroupProduct& what, Site site,
                                     void* caller) {
  u64 index = self.matrix.issued++ - group.first_product;
  if (index < group.products.size()) {
    check_agreement(*group.products[index], what, self.matrix.open_group, site);
    return *group.products[index];
  }
  MatrixProduct& product = self.block->product_pool.take();
  product.what = what;
  product.first = &self;
  product.site = site;
  product.caller = caller;
  product.group = self.matrix.open_group;
  product.arrived = product.warps = 0;
  product.done = false;
  group.products.push_back(&product);
  return product;
}

// Accesses of the thread to its registers before its last wgmma_fence are ordered before the product, later ones are
// not. Products that accumulate in the same registers are ordered, also those of different groups: `earlier` is the group
// of the last one in flight, or kNoGroup.
static void note_registers(Thread& self, Warpgroup& group, const MatrixProduct& product, float* d, const u32* a,
                           u64 earlier) {
  if (!kThreadSanitizer) return;
  u32 warp = rank_of(self) / 32;
  Engine& of_group = group.register_engines[warp][product.group % Warpgroup::kEngines];
  AsEngine engine(created(*self.block, of_group, "wgmma (registers)"));
  acquire(&self.matrix.fence_order);
  if (earlier != kNoGroup) acquire(&group.group_order[warp][earlier % Warpgroup::kOrders]);
  if (a) note_read(a, 4 * sizeof(u32), product.caller);
  note_write(d, product.what.columns / 2 * sizeof(float), product.caller);
  release(&group.group_order[warp][product.group % Warpgroup::kOrders]);
}

void wgmma_fence() {
  Thread& self = running_thread();
  self.matrix.fenced = true;
  release(&self.matrix.fence_order);
}

void wgmma(float* d, const WarpgroupProduct& what, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  void* caller = __builtin_return_address(0);
  Warpgroup& group = warpgroup_of(self, site);
  if (what.columns % 8 || what.columns < 8 || what.columns > int(kMaxColumns))
    fail(site, "wgmma of %d columns: multiples of 8 up to 256 are possible", what.columns);
  if (!self.matrix.fenced)
    fail(site, "wgmma without a wgmma_fence() since the thread %s", self.matrix.issued ? "last waited" : "began");
  MatrixProduct& product = joined_product(self, group, what, site, caller);
  begin_operands(self, group, product);
  if (what.a_registers) take_a_registers(product, rank_of(self), what.a_registers);
  u64 earlier = hold_accumulator(group, self, product, d);
  note_registers(self, group, product, d, what.a_registers, earlier);
  record(Did::kMultiplyAsync, site, 0, 0, u32(what.columns));
  if (++product.arrived < kWarpgroupThreads) return;
  ++block.collectives;
  ++block.products_in_flight;
  CopyPolicy policy = CopyPolicy(block.request->copies);
  if (policy == CopyPolicy::kEarly || (policy == CopyPolicy::kRandom && block.random.below(4) == 0))
    while (perform_product(block, self.linear / kWarpgroupThreads)) continue;
}

void wgmma_commit() {
  ++running_thread().matrix.open_group;
  record(Did::kCommitProducts, Site{});
}

// ---- waits ----

// After the first wait, the product no longer uses shared memory.
static void end_claims(Block& block, Warpgroup& group, u64 complete) {
  size_t ended = 0;
  while (ended < group.products.size() && group.products[ended]->group < complete) {
    MatrixProduct& product = *group.products[ended++];
    block.async_proxy.end(product.b_tile);
    if (!product.what.a_registers)
      for (Claim& claim : product.a_rows) block.async_proxy.end(claim);
    block.product_pool.give_back(product);
  }
  for (size_t i = ended; i < group.products.size(); ++i) group.products[i - ended] = group.products[i];
  group.products.resize(group.products.size() - ended);
  group.first_product += ended;
}

void wgmma_wait(int pending, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  Warpgroup& group = warpgroup_of(self, site);
  WarpgroupMember& member = self.matrix;
  u64 complete = member.open_group > u64(pending) ? member.open_group - u64(pending) : 0;
  member.fenced = false;
  if (!are_done(group, complete)) {
    member.awaited_groups = complete;
    suspend(State::kProducts, site);
  }
  end_claims(block, group, complete);
  release_accumulators(block, group, rank_of(self), complete);
  for (; member.ordered_groups < complete; ++member.ordered_groups)
    acquire(&group.group_order[rank_of(self) / 32][member.ordered_groups % Warpgroup::kOrders]);
  record(Did::kAwaitProducts, site, 0, 0, u32(pending));
}

int describe_product_wait(const Thread& thread, char* text, size_t room) {
  const Warpgroup& group = thread.block->warpgroups[thread.linear / kWarpgroupThreads];
  for (const MatrixProduct* product : group.products)
    if (!product->done)
      return snprintf(text, room, "wait at %s:%d for the wgmma of %s:%d, which %u of 128 threads have issued",
                      thread.site.file, thread.site.line, product->site.file, product->site.line, product->arrived);
  return snprintf(text, room, "wait for wgmma at %s:%d", thread.site.file, thread.site.line);
}

void check_products_at_exit(Thread& thread) {
  if (thread.linear / kWarpgroupThreads >= thread.block->whole_warpgroups()) return;
  for (const Accumulator* accumulator : thread.block->warpgroups[thread.linear / kWarpgroupThreads].accumulators) {
    if (!accumulator->registers[rank_of(thread)]) continue;
    Warpgroup& group = thread.block->warpgroups[thread.linear / kWarpgroupThreads];
    Site site = group.products.empty() ? thread.site : group.products.back()->site;
    fail(site, "the thread ends without a wgmma_wait for its last wgmma%s",
         accumulator->last_group[rank_of(thread)] == thread.matrix.open_group ? " (no wgmma_commit either)" : "");
  }
}

}  // namespace emulator
