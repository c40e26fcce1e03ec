// Progress of TMA and wgmma: between any two steps of the block, or only when no thread can continue.
#include "block.h"

namespace emulator {

constexpr u32 kSeldom = 8;  // one step in eight

void advance_engines_at_random(Block& block) {
  if (CopyPolicy(block.request->copies) != CopyPolicy::kRandom) return;
  AsBlock of_engines(block);
  if (block.copies_in_flight && block.random.below(kSeldom) == 0) land_random_copy(block);
  u32 copies = u32(block.tensor_copies.in_flight.size());
  if (copies && block.random.below(kSeldom) == 0) perform_tensor_copy(block, block.random.below(copies));
  u32 stores = u32(block.remote_stores.size());
  if (stores && block.random.below(kSeldom) == 0) land_remote_store(block, block.random.below(stores));
  if (block.products_in_flight && block.random.below(kSeldom) == 0) perform_random_product(block);
}

// Called when no thread is ready: performs one operation for which a thread waits. Returns false if there is none.
bool advance_engines(Block& block) {
  AsBlock of_engines(block);
  return perform_awaited_product(block) || land_newest_load(block) || land_newest_remote_store(block);
}

// Creates an engine at its first use, since each costs ThreadSanitizer a millisecond, and time at every acquire. The
// worker is its creator: it is not ordered after the block's threads, so neither is the engine.
Engine& created(Block& block, Engine& engine, const char* name) {
  if (kThreadSanitizer && !engine.tsan) {
    AsEngine creator(Engine{first_of_cluster(block).worker.tsan});
    engine.create(name);
  }
  return engine;
}

void check_block_at_end(Block& block) {
  check_loads_at_end(block);
  check_mbarriers_at_end(block);
  check_registers_at_end(block);
}

}  // namespace emulator
