// CUDA's barriers, shuffles and votes. The compiler fills in the trailing Site at the call.
#pragma once

namespace emulator {

template <class T>
inline T shuffle(u32 mask, T value, u32 source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(mask, bits, source, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

inline void __syncthreads(FLASHGEN_SITE) { ::emulator::block_barrier(0, ::emulator::BarrierKind::kSync, 0, site); }
inline int __syncthreads_or(int predicate, FLASHGEN_SITE) {
  return ::emulator::block_barrier(0, ::emulator::BarrierKind::kOr, predicate, site);
}
inline int __syncthreads_and(int predicate, FLASHGEN_SITE) {
  return ::emulator::block_barrier(0, ::emulator::BarrierKind::kAnd, predicate, site);
}
inline int __syncthreads_count(int predicate, FLASHGEN_SITE) {
  return ::emulator::block_barrier(0, ::emulator::BarrierKind::kCount, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, FLASHGEN_SITE) { ::emulator::sync_warp(mask, site); }

// `width` divides the warp into segments. A source outside of the lane's segment gives the lane's own value.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, FLASHGEN_SITE) {
  unsigned lane = ::emulator::current->lane, segment = lane & ~unsigned(width - 1);
  return ::emulator::shuffle(mask, value, segment | (unsigned(source) & unsigned(width - 1)), site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, FLASHGEN_SITE) {
  unsigned lane = ::emulator::current->lane, source = lane ^ unsigned(lane_mask), last = lane | unsigned(width - 1);
  return ::emulator::shuffle(mask, value, source <= last && source < 32 ? source : lane, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FLASHGEN_SITE) {
  unsigned lane = ::emulator::current->lane, within = lane & unsigned(width - 1);
  return ::emulator::shuffle(mask, value, within >= delta ? lane - delta : lane, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FLASHGEN_SITE) {
  unsigned lane = ::emulator::current->lane, within = lane & unsigned(width - 1);
  return ::emulator::shuffle(mask, value, within + delta < unsigned(width) ? lane + delta : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, FLASHGEN_SITE) {
  return ::emulator::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, FLASHGEN_SITE) {
  return ::emulator::ballot(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FLASHGEN_SITE) {
  return ::emulator::ballot(mask, predicate != 0, site) == mask;
}

inline void __threadfence() { ::emulator::memory_fence(); }
inline void __threadfence_block() { ::emulator::memory_fence(); }
[[noreturn]] inline void __trap(FLASHGEN_SITE) { ::emulator::fail(site, "__trap()"); }
