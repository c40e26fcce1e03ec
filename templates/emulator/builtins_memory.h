// Read-only loads and atomics. Atomics are relaxed as in CUDA, so that ThreadSanitizer accepts the update itself and
// still reports unordered plain accesses.
#pragma once

template <class T>
inline T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
inline T __ldcg(const T* pointer) {
  return *pointer;
}
template <class T>
inline T __ldcs(const T* pointer) {
  return *pointer;
}
template <class T>
inline void __stcg(T* pointer, T value) {
  *pointer = value;
}
template <class T>
inline void __stcs(T* pointer, T value) {
  *pointer = value;
}

inline size_t __cvta_generic_to_shared(const void* pointer, FLASHGEN_SITE) {
  return ::emulator::shared_address(pointer, site);
}

namespace emulator {

// Atomically replaces *pointer by update(*pointer) and returns the previous value.
template <class T, class Update>
inline T atomic_update(T* pointer, Update update) {
  T seen;
  __atomic_load(pointer, &seen, __ATOMIC_RELAXED);
  for (;;) {
    T next = update(seen);
    if (__atomic_compare_exchange(pointer, &seen, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return seen;
  }
}

// Keeps `value` from deducing T: atomicAdd(unsigned*, 1) must mean what it means in CUDA.
template <class T>
struct Same {
  using Type = T;
};

}  // namespace emulator

template <class T>
inline T atomicAdd(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return T(old + value); });
}
template <class T>
inline T atomicSub(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return T(old - value); });
}
// Increments a counter that wraps to 0 after the limit.
inline unsigned atomicInc(unsigned* pointer, unsigned limit) {
  return ::emulator::atomic_update(pointer, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
template <class T>
inline T atomicMax(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicAnd(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return T(old & value); });
}
template <class T>
inline T atomicOr(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T old) { return T(old | value); });
}
template <class T>
inline T atomicExch(T* pointer, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [value](T) { return value; });
}
template <class T>
inline T atomicCAS(T* pointer, typename ::emulator::Same<T>::Type expected, typename ::emulator::Same<T>::Type value) {
  return ::emulator::atomic_update(pointer, [=](T old) { return old == expected ? value : old; });
}
