// TMA: copies of boxes between tensors and shared memory, from their issue to the wait that guarantees their
// completion.
#pragma once
#include "async_proxy.h"
#include "mbarriers.h"
#include "sanitizers.h"
#include "tensor_map.h"

namespace emulator {

enum class TensorOperation { kLoad, kStore, kAdd };

struct TensorCopy {
  TensorOperation operation;
  TensorBox box;
  u32 shared;  // address
  Thread* issuer;
  Site site;
  void* caller;
  bool done;
  Claim claim;                 // of shared memory
  Engine engine;
  MBarrier* barrier;           // of a load
  u32 phase;                   // current phase of the barrier at the issue
  u32 group;                   // of a store
  Vector<unsigned char> copy;  // of a store: the contents at its issue, which must not change until they are read
  char issue_order, read_order;
};

// All copies of a block. Each thread also keeps a list of its own stores (BulkCopies).
struct TensorCopies {
  // Copies use many engines cyclically, so that one copy is not ordered after the previous one.
  static constexpr u32 kEngines = 32;

  Pool<TensorCopy> pool;
  Vector<TensorCopy*> in_flight;
  Engine engines[kEngines];
  u32 next_engine = 0;

  void reset();
};

struct BulkCopies {
  Vector<TensorCopy*> stores;  // not waited for yet
  u32 open_group = 0;
  char written = 0;  // orders their writes to global memory before accesses of threads that synchronise with this one
};

// ---- tensor_copies.cpp ----
const char* name_of(TensorOperation operation);
u32 chunk_offset(const TensorCopy& copy, u32 row, u32 byte);  // in shared memory
constexpr u32 kBoxAlignment = 128, kRunAlignment = 16;  // of shared memory, in bytes
TensorCopy& new_copy(TensorOperation operation, const TensorBox& box, u32 shared, u32 alignment, Site site,
                     void* caller);
void forget(Block& block, TensorCopy& copy);  // removes it from the copies in flight
bool lands_at_once(Block& block);
void note_tensor(const TensorCopy& copy);  // reports its accesses to the tensor to sanitizers

// ---- tensor_stores.cpp ----
void perform_store(Block& block, TensorCopy& copy);

}  // namespace emulator
