#include "async_proxy.h"

#include <string.h>

#include "block.h"

namespace emulator {

bool ChunkSet::meets(const ChunkSet& other, u32* offset) const {
  for (size_t i = 0; i < words.size(); ++i) {
    if (u64 both = words[i] & other.words[i]) {
      *offset = u32(i * 64 + u32(__builtin_ctzll(both))) * kChunkBytes;
      return true;
    }
  }
  return false;
}

void AsyncProxy::reset(unsigned char* shared, u32 shared_bytes) {
  shared_ = shared;
  shared_bytes_ = shared_bytes;
  used_ = has_tags_ = false;
  claims_.clear();
}

void AsyncProxy::use() {
  if (used_) return;
  used_ = true;
  seen_.assign(shared_bytes_ + kChunkBytes, 0xff);  // as shared memory is initialised
  tags_.assign(shared_bytes_ / kChunkBytes + 1, 0);
}

// Plain stores do not record their thread, so that a fence of any thread publishes them, and a missing fence is found
// only if no other thread executes one in between. Stores by stmatrix are published by a fence of their own warp.
void AsyncProxy::fence(u32 warp) {
  use();
  if (!has_tags_) {
    memcpy(seen_.data(), shared_, shared_bytes_);
    return;
  }
  has_tags_ = false;
  for (u32 chunk = 0; chunk * kChunkBytes < shared_bytes_; ++chunk) {
    if (tags_[chunk] == warp + 1) tags_[chunk] = 0;
    if (tags_[chunk] != 0) {
      has_tags_ = true;
      continue;
    }
    u32 offset = chunk * kChunkBytes, left = shared_bytes_ - offset;
    memcpy(seen_.data() + offset, shared_ + offset, left < kChunkBytes ? left : kChunkBytes);
  }
}

void AsyncProxy::begin(Claim& claim) {
  use();
  for (const Claim* other : claims_) {
    u32 offset;
    if (!(claim.writes || other->writes) || !claim.chunks.meets(other->chunks, &offset)) continue;
    fail(claim.site, "%s %s shared memory at offset %u, which the %s of %s:%d may still %s", claim.what,
         claim.writes ? "writes" : "reads", offset, other->what, other->site.file, other->site.line,
         other->writes ? "write" : "read");
  }
  claims_.push_back(&claim);
}

void AsyncProxy::end(Claim& claim) {
  for (Claim*& entry : claims_) {
    if (entry != &claim) continue;
    entry = claims_.back();
    claims_.pop_back();
    return;
  }
}

static bool is_untouched(const unsigned char* chunk) {
  u64 words[2];
  memcpy(words, chunk, sizeof words);
  return (words[0] & words[1]) == ~0ull;
}

void AsyncProxy::check_chunk_visible(u32 offset, const Claim& claim) const {
  if (memcmp(seen_.data() + offset, shared_ + offset, kChunkBytes) != 0)
    fail(claim.site,
         "%s reads shared memory at offset %u that ordinary stores wrote%s: fence_async_shared() is missing between "
         "the stores and the barrier before this",
         claim.what, offset, tags_[offset / kChunkBytes] ? " (stmatrix)" : "");
  if (is_untouched(shared_ + offset))
    fail(claim.site, "%s reads shared memory at offset %u, which nothing has been written to", claim.what, offset);
}

void AsyncProxy::check_visible(const Claim& claim) const {
  for (size_t i = 0; i < claim.chunks.words.size(); ++i)
    for (u64 word = claim.chunks.words[i]; word; word &= word - 1)
      check_chunk_visible(u32(i * 64 + u32(__builtin_ctzll(word))) * kChunkBytes, claim);
}

void AsyncProxy::write(u32 offset, const void* chunk) {
  memcpy(shared_ + offset, chunk, kChunkBytes);
  memcpy(seen_.data() + offset, chunk, kChunkBytes);
  tags_[offset / kChunkBytes] = 0;
}

void AsyncProxy::poison(u32 offset, u32 bytes) {
  use();
  memset(shared_ + offset, 0xff, bytes);
  memset(seen_.data() + offset, 0xff, bytes);
}

void AsyncProxy::check_generic(u32 offset, u32 bytes, bool writes, const char* what, Site site) const {
  for (const Claim* other : claims_) {
    if (!(writes || other->writes)) continue;
    for (u32 at = offset; at < offset + bytes; at += kChunkBytes)
      if (other->chunks.has(at))
        fail(site, "%s %s shared memory at offset %u, which the %s of %s:%d may still %s", what,
             writes ? "writes" : "reads", at, other->what, other->site.file, other->site.line,
             other->writes ? "write" : "read");
  }
}

void AsyncProxy::note_generic_write(u32 offset, u32 bytes, u32 warp) {
  use();
  has_tags_ = true;
  for (u32 at = offset; at < offset + bytes; at += kChunkBytes) tags_[at / kChunkBytes] = u16(warp + 1);
}

void fence_async_shared() {
  Thread& self = running_thread();
  self.block->async_proxy.fence(self.warp);
  fence_own_mbarriers(self);
}

}  // namespace emulator
