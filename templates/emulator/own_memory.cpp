#include "own_memory.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "sanitizers.h"

namespace emulator {

#ifdef FLASHGEN_TSAN

struct FreeBlock {
  FreeBlock* next;
};

// Sizes are powers of two. Freed memory is kept for the next allocation of its size.
static thread_local FreeBlock* free_blocks[48];
static thread_local char* fresh;
static thread_local size_t fresh_bytes;

static int size_class(size_t bytes) { return bytes <= 64 ? 6 : 64 - __builtin_clzll(bytes - 1); }

void* own_allocate(size_t bytes) {
  int size = size_class(bytes);
  if (FreeBlock* block = free_blocks[size]) {
    free_blocks[size] = block->next;
    return block;
  }
  size_t rounded = size_t(1) << size;
  if (fresh_bytes < rounded) {
    fresh_bytes = rounded > (1 << 20) ? rounded : 1 << 20;
    void* memory = mmap(nullptr, fresh_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    fresh = static_cast<char*>(memory);
  }
  void* block = fresh;
  fresh += rounded;
  fresh_bytes -= rounded;
  return block;
}

void own_free(void* memory, size_t bytes) {
  FreeBlock* block = static_cast<FreeBlock*>(memory);
  block->next = free_blocks[size_class(bytes)];
  free_blocks[size_class(bytes)] = block;
}

#else

void* own_allocate(size_t bytes) { return ::operator new(bytes); }
void own_free(void* memory, size_t) { ::operator delete(memory); }

#endif

}  // namespace emulator
