// The asynchronous side of shared memory: what of it TMA and wgmma see, and what of it they may still be using.
//
// Ordinary stores reach TMA and wgmma only through fence.proxy.async. The proxy keeps a copy of shared memory as they
// see it, brought up to date by fences and by what TMA writes; a read where copy and memory differ is a missing fence.
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
  bool meets(const ChunkSet& other, u32* offset) const;  // offset: of the first chunk that both have
};

// What one asynchronous operation may touch, from its issue until somebody has waited for it.
struct Claim {
  const char* what = "";
  Site site{};
  bool writes = false;
  ChunkSet chunks;
};

class AsyncProxy {
 public:
  void reset(unsigned char* shared, u32 shared_bytes);

  // fence.proxy.async of a thread of `warp`.
  void fence(u32 warp);

  // The operation begins: fails where another in flight writes what this touches, or reads what this writes.
  void begin(Claim& claim);
  void end(Claim& claim);
  // Fails where the claim reads what the proxy does not see, or what nobody has ever written.
  void check_visible(const Claim& claim) const;

  // Writes as TMA does: into shared memory, seen by everybody.
  void write(u32 offset, const void* chunk);
  void poison(u32 offset, u32 bytes);  // a load in flight: NaN until it lands

  // Accesses of the generic proxy that the runtime knows of: ldmatrix, stmatrix, cp.async.
  void check_generic(u32 offset, u32 bytes, bool writes, const char* what, Site site) const;
  void note_generic_write(u32 offset, u32 bytes, u32 warp);

 private:
  void use();  // before the first, nothing is kept
  void check_chunk_visible(u32 offset, const Claim& claim) const;

  unsigned char* shared_ = nullptr;
  u32 shared_bytes_ = 0;
  bool used_ = false, has_tags_ = false;
  Vector<unsigned char> seen_;  // shared memory as the proxy sees it
  Vector<u16> tags_;            // of each chunk: 1 + the warp that wrote it by stmatrix and owes a fence
  Vector<Claim*> claims_;
};

}  // namespace emulator
