// TMA: functions of all copies, and loads. The destination of a load holds NaN until it completes. To ThreadSanitizer
// each copy is an engine that may run at any time after the issue.
#include "tensor_copies.h"

#include <string.h>

#include "block.h"

namespace emulator {

const char* name_of(TensorOperation operation) {
  switch (operation) {
    case TensorOperation::kLoad:
      return "TMA load";
    case TensorOperation::kStore:
      return "TMA store";
    case TensorOperation::kAdd:
      return "TMA reduce-add";
  }
  return "?";
}

u32 chunk_offset(const TensorCopy& copy, u32 row, u32 byte) {
  return swizzled(copy.shared + row * copy.box.row_bytes + byte, copy.box.map.swizzle_bytes) - kWindowBase;
}

void TensorCopies::reset() {
  in_flight.clear();
  pool.give_all_back();
  for (Engine& engine : engines) engine.destroy();  // engines of the next block are not ordered after this one
}

static Engine next_engine(Block& block) {
  TensorCopies& copies = block.tensor_copies;
  return created(block, copies.engines[copies.next_engine++ % TensorCopies::kEngines], "TMA");
}

TensorCopy& new_copy(TensorOperation operation, const TensorBox& box, u32 shared, u32 alignment, Site site,
                     void* caller) {
  Thread& self = running_thread();
  Block& block = *self.block;
  TensorCopy& copy = block.tensor_copies.pool.take();
  copy.operation = operation;
  copy.box = box;
  copy.shared = shared;
  copy.issuer = &self;
  copy.site = site;
  copy.caller = caller;
  copy.done = false;
  copy.engine = next_engine(block);
  shared_pointer(shared, copy.box.bytes(), alignment, site);
  copy.claim.what = name_of(operation);
  copy.claim.site = site;
  copy.claim.writes = operation == TensorOperation::kLoad;
  copy.claim.chunks.clear(self.shared_bytes);
  for (u32 row = 0; row < copy.box.rows; ++row)
    for (u32 byte = 0; byte < copy.box.row_bytes; byte += kChunkBytes)
      copy.claim.chunks.add(chunk_offset(copy, row, byte), kChunkBytes);
  block.async_proxy.begin(copy.claim);
  ++block.async_copies;
  block.tensor_copies.in_flight.push_back(&copy);
  return copy;
}

void forget(Block& block, TensorCopy& copy) {
  Vector<TensorCopy*>& in_flight = block.tensor_copies.in_flight;
  for (size_t i = 0; i < in_flight.size(); ++i) {
    if (in_flight[i] != &copy) continue;
    for (size_t j = i + 1; j < in_flight.size(); ++j) in_flight[j - 1] = in_flight[j];
    in_flight.pop_back();
    return;
  }
}

bool lands_at_once(Block& block) {
  CopyPolicy policy = CopyPolicy(block.request->copies);
  return policy == CopyPolicy::kEarly || (policy == CopyPolicy::kRandom && block.random.below(4) == 0);
}

// ---- loads ----

static void land(Block& block, TensorCopy& copy) {
  const TensorBox& box = copy.box;
  alignas(kChunkBytes) unsigned char row_data[256 * 4];
  for (u32 row = 0; row < box.rows; ++row) {
    memset(row_data, 0, box.row_bytes);
    if (const char* source = box.row_address(row))
      memcpy(row_data + box.first_byte, source, box.past_bytes - box.first_byte);
    for (u32 byte = 0; byte < box.row_bytes; byte += kChunkBytes)
      block.async_proxy.write(chunk_offset(copy, row, byte), row_data + byte);
  }
  block.async_proxy.end(copy.claim);
  forget(block, copy);
  AsEngine engine(copy.engine);
  copy.barrier->complete_bytes(box.bytes(), copy.phase, *copy.issuer, copy.site);
  block.tensor_copies.pool.give_back(copy);
}

void note_tensor(const TensorCopy& copy) {
  const TensorBox& box = copy.box;
  for (u32 row = 0; row < box.rows; ++row) {
    char* address = box.row_address(row);
    if (!address) continue;
    if (copy.operation == TensorOperation::kLoad)
      note_read(address, box.past_bytes - box.first_byte, copy.caller);
    else if (copy.operation == TensorOperation::kStore)
      note_write(address, box.past_bytes - box.first_byte, copy.caller);
    else
      note_atomics(address, box.past_bytes - box.first_byte, copy.caller);
  }
}

static void start_load(const TensorBox& box, u32 destination, u32 alignment, u32 barrier, Site site, void* caller) {
  Thread& self = running_thread();
  Block& block = *self.block;
  MBarrier& target = mbarrier_at(self, barrier, site, caller);
  if (!target.fenced)
    fail(site, "the mbarrier of this load was initialised at %s:%d without a mbarrier_fence_init() after it",
         target.site.file, target.site.line);
  TensorCopy& copy = new_copy(TensorOperation::kLoad, box, destination, alignment, site, caller);
  copy.barrier = &target;
  copy.phase = target.phase;
  release(&copy.issue_order);
  {
    AsEngine engine(copy.engine);
    acquire(&copy.issue_order);
    note_tensor(copy);
    if (kThreadSanitizer) note_write(self.shared + (destination - kWindowBase), copy.box.bytes(), caller);
  }
  block.async_proxy.poison(destination - kWindowBase, copy.box.bytes());
  record(Did::kLoad, site, target.offset, target.phase, copy.box.bytes(), true);
  if (lands_at_once(block)) land(block, copy);
}

void tensor_load(u32 destination, const void* map, u32 barrier, int rank, const int* start, Site site) {
  start_load(tensor_box(map, rank, start, site), destination, kBoxAlignment, barrier, site,
             __builtin_return_address(0));
}

void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, Site site) {
  start_load(run_box(source, bytes, site), destination, kRunAlignment, barrier, site, __builtin_return_address(0));
}

// ---- called by the scheduler ----

void perform_tensor_copy(Block& block, size_t index) {
  TensorCopy& copy = *block.tensor_copies.in_flight[index];
  Blame issuer(*copy.issuer);
  if (copy.operation == TensorOperation::kLoad)
    land(block, copy);
  else
    perform_store(block, copy);
}

// Completes the newest load first, since a wait for one copy guarantees nothing about earlier ones.
bool land_newest_load(Block& block) {
  for (size_t i = block.tensor_copies.in_flight.size(); i > 0; --i) {
    if (block.tensor_copies.in_flight[i - 1]->operation != TensorOperation::kLoad) continue;
    perform_tensor_copy(block, i - 1);
    return true;
  }
  return false;
}

void check_loads_at_end(Block& block) {
  if (block.tensor_copies.in_flight.empty()) return;
  const TensorCopy& copy = *block.tensor_copies.in_flight.front();
  Blame issuer(*copy.issuer);
  fail(copy.site, "the block ends, and nobody has waited for this %s", name_of(copy.operation));
}

}  // namespace emulator
