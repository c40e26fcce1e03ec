// The asynchronous proxy of shared memory: the contents that TMA and wgmma see, and the chunks that they may still use.
//
// Ordinary stores reach TMA and wgmma only through fence.proxy.async. The proxy keeps a copy of shared memory as they
// see it, which fences and writes by TMA update. If copy and memory differ where they read, a fence is missing.
#pragma once
#include "own_memory.h"
#include "shared_window.h"

namespace emulator {

// A set of 16-byte chunks of shared memory.
struct ChunkSet {
  Vector<u64> words;

  void clear(u32 shared_bytes) { words.assign(shared_bytes / kChunkBytes / 64 + 1, 0); }
  void add(u32 offset, u32 bytes) {
    for (u32 chunk = offset / kChunkBytes; chunk * kChunkBytes < offset + bytes; ++chunk)
      words[chunk / 64] |= 1ull << chunk % 64;
  }
  bool has(u32 offset) const { return words[offset / kChunkBytes / 64] >> offset / kChunkBytes % 64 & 1; }
  bool meets(const ChunkSet& other, u32* offset) const;  // offset: of the first common chunk
};

// The chunks that an asynchronous operation may access, from its issue until a thread has waited for it.
struct Claim {
  const char* what = "";
  Site site{};
  bool writes = false;
  ChunkSet chunks;
};

class AsyncProxy {
 public:
  void reset(unsigned char* shared, u32 shared_bytes);

  // Executes fence.proxy.async for a thread of `warp`.
  void fence(u32 warp);

  // Begins an operation. Fails if another one in flight writes what it accesses, or reads what it writes.
  void begin(Claim& claim);
  void end(Claim& claim);
  // Fails if the claim reads what the proxy does not see, or what was never written.
  void check_visible(const Claim& claim) const;

  // Writes to shared memory as TMA does, visible to both proxies.
  void write(u32 offset, const void* chunk);
  void poison(u32 offset, u32 bytes);  // fills with NaN until a load completes

  // Checks accesses by ldmatrix, stmatrix and cp.async, the only ones of the generic proxy that the runtime sees.
  void check_generic(u32 offset, u32 bytes, bool writes, const char* what, Site site) const;
  void note_generic_write(u32 offset, u32 bytes, u32 warp);

 private:
  void use();  // starts the bookkeeping at the first use
  void check_chunk_visible(u32 offset, const Claim& claim) const;

  unsigned char* shared_ = nullptr;
  u32 shared_bytes_ = 0;
  bool used_ = false, has_tags_ = false;
  Vector<unsigned char> seen_;  // shared memory as the proxy sees it
  Vector<u16> tags_;            // of each chunk: 1 + the warp that wrote it by stmatrix without a fence yet
  Vector<Claim*> claims_;
};

}  // namespace emulator
