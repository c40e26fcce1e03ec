// Clusters: their barrier, and accesses to the shared memory of another block. The destination of st.async holds NaN until
// the store is performed. To ThreadSanitizer each store is an engine that may write at any time after the issue.
#include "clusters.h"

#include <string.h>

#include "block.h"

namespace emulator {

// A remote address has the rank of the block, plus 1, in its upper bits, so that it is out of bounds for other accesses.
constexpr u32 kRankShift = 24;

u32 remote_address(u32 address, u32 rank, Site site) {
  const Cluster& cluster = *running_thread().block->cluster;
  if (rank >= cluster.blocks.size())
    fail(site, "a block of rank %u was addressed in a cluster of %zu", rank, cluster.blocks.size());
  if (address >> kRankShift) fail(site, "the shared address %u is remote already", address);
  return address | (rank + 1) << kRankShift;
}

struct RemoteMemory {
  Block* block;
  u32 offset;
  unsigned char* pointer;
};

static RemoteMemory remote_memory(u32 address, u32 bytes, Site site) {
  const Block& own = *running_thread().block;
  u32 rank = (address >> kRankShift) - 1, offset = (address & ((1u << kRankShift) - 1)) - kWindowBase;
  if (rank >= own.cluster->blocks.size()) fail(site, "the shared address %u is not one of another block", address);
  Block& block = *own.cluster->blocks[rank];
  u32 limit = own.request->shared_bytes;
  if (offset > limit || bytes > limit - offset)
    fail(site, "shared memory of block %u of the cluster out of bounds: %u bytes at offset %d of %u", rank, bytes,
         int(offset), limit);
  if (offset % bytes) fail(site, "misaligned remote address: offset %u is not a multiple of %u", offset, bytes);
  if (block.alive == 0) fail(site, "block %u of the cluster has ended: a cluster_sync() is missing before its end", rank);
  return {&block, offset, block.shared + offset};
}

static MBarrier& remote_mbarrier(u32 address, Site site, void* caller) {
  RemoteMemory memory = remote_memory(address, 8, site);
  return mbarrier_in(*memory.block, memory.pointer, memory.offset, site, caller);
}

void remote_arrive(u32 barrier, Site site) {
  arrive_at(remote_mbarrier(barrier, site, __builtin_return_address(0)), site);
  hesitate(site);
}

void remote_store(u32 destination, const u32* words, u32 barrier, Site site) {
  void* caller = __builtin_return_address(0);
  Thread& self = running_thread();
  RemoteMemory memory = remote_memory(destination, sizeof(RemoteStore::words), site);
  MBarrier& target = remote_mbarrier(barrier, site, caller);
  RemoteStore& store = memory.block->remote_store_pool.take();
  store.offset = memory.offset;
  memcpy(store.words, words, sizeof store.words);
  store.issuer = &self;
  store.barrier = &target;
  store.phase = target.phase;
  store.site = site;
  store.caller = caller;
  TensorCopies& copies = self.block->tensor_copies;
  store.engine = created(*self.block, copies.engines[copies.next_engine++ % TensorCopies::kEngines], "st.async");
  release(&store.issue_order);
  {
    AsEngine engine(store.engine);
    acquire(&store.issue_order);
    if (kThreadSanitizer) note_write(memory.pointer, sizeof store.words, caller);
  }
  memory.block->async_proxy.poison(memory.offset, sizeof store.words);
  memory.block->remote_stores.push_back(&store);
  if (lands_at_once(*self.block)) land_remote_store(*memory.block, memory.block->remote_stores.size() - 1);
}

void land_remote_store(Block& block, size_t index) {
  RemoteStore& store = *block.remote_stores[index];
  AsBlock of_issuer(*store.issuer->block);
  Blame issuer(*store.issuer);
  block.async_proxy.write(store.offset, store.words);
  block.remote_stores[index] = block.remote_stores.back();
  block.remote_stores.pop_back();
  AsEngine engine(store.engine);
  store.barrier->complete_bytes(sizeof store.words, store.phase, *store.issuer, store.site);
  block.remote_store_pool.give_back(store);
}

bool land_newest_remote_store(Block& block) {
  if (block.remote_stores.empty()) return false;
  land_remote_store(block, block.remote_stores.size() - 1);
  return true;
}

static void open_cluster_barrier(Cluster& cluster) {
  ++cluster.meetings;
  cluster.arrived = 0;
  for (Thread* thread : cluster.waiting) make_ready(*thread);
  cluster.waiting.clear();
}

void cluster_barrier(Site site) {
  Thread& self = running_thread();
  Cluster& cluster = *self.block->cluster;
  char* order = &cluster.order[cluster.meetings & 1];
  ++cluster.arrived;
  release(order);
  if (cluster.arrived == cluster.alive) {
    ++self.block->collectives;
    open_cluster_barrier(cluster);
  } else {
    cluster.waiting.push_back(&self);
    suspend(State::kClusterBarrier, site);
  }
  acquire(order);
}

void release_cluster_at_exit(Cluster& cluster) {
  if (cluster.arrived && cluster.arrived == cluster.alive) open_cluster_barrier(cluster);
}

}  // namespace emulator
