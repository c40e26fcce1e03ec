// Definitions of the CUDA keywords for the host compiler.
#pragma once

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
// Always inlined, so that the address from which the runtime is called is in the kernel.
#define FLASHGEN_PRIMITIVE inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)

// Shared memory is one dynamic buffer per block, newly allocated with its exact size, so that an overflow by one byte
// is detected. A static variable allows neither, so it is refused.
#define __shared__ static_assert(false, "the emulator has dynamic shared memory only: use shared_memory");
#define shared_memory (::emulator::dynamic_shared_memory())

struct TensorMap;  // defined by the emitted source; primitives take references

#define threadIdx (::emulator::current->thread_index)
#define blockIdx (::emulator::current->block_index)
#define blockDim (::emulator::current->block_size)
#define gridDim (::emulator::current->grid_size)
#define warpSize 32

#ifndef __clang__
#define __builtin_assume(condition) ((void)0)
#endif

typedef __SIZE_TYPE__ size_t;
