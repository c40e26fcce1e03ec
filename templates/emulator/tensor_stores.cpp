// Stores and reductions by TMA. They read shared memory when they are performed, and its contents must not have changed
// since the issue.
#include <string.h>

#include "block.h"
#include "half_conversions.h"

namespace emulator {

static void read_box(const TensorCopy& copy, const unsigned char* shared, unsigned char* out) {
  for (u32 row = 0; row < copy.box.rows; ++row)
    for (u32 byte = 0; byte < copy.box.row_bytes; byte += kChunkBytes, out += kChunkBytes)
      memcpy(out, shared + chunk_offset(copy, row, byte), kChunkBytes);
}

template <class T, class Update>
static void update_atomically(T* target, Update update) {
  T seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(target, &seen, update(seen), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
}

static void add_f32(char* target, const unsigned char* source) {
  float value;
  memcpy(&value, source, sizeof value);
  update_atomically(reinterpret_cast<u32*>(target),
                    [value](u32 old) { return bit_cast<u32>(bit_cast<float>(old) + value); });
}

static void add_half(char* target, const unsigned char* source, bool is_f16) {
  u16 value;
  memcpy(&value, source, sizeof value);
  update_atomically(reinterpret_cast<u16*>(target), [value, is_f16](u16 old) {
    return is_f16 ? f16_from_float(float_from_f16(old) + float_from_f16(value))
                  : bf16_from_float(float_from_bf16(old) + float_from_bf16(value));
  });
}

static void write_row(const TensorCopy& copy, char* target, const unsigned char* source, u32 bytes) {
  if (copy.operation == TensorOperation::kStore) {
    memcpy(target, source, bytes);
    return;
  }
  TensorElement element = copy.box.map.element;
  for (u32 byte = 0; byte < bytes; byte += element_bytes(element)) {
    if (element == TensorElement::kF32)
      add_f32(target + byte, source + byte);
    else
      add_half(target + byte, source + byte, element == TensorElement::kF16);
  }
}

void perform_store(Block& block, TensorCopy& copy) {
  if (copy.done) return;
  copy.done = true;
  forget(block, copy);
  const TensorBox& box = copy.box;
  Vector<unsigned char>& data = block.store_data;
  data.resize(box.bytes());
  read_box(copy, block.shared, data.data());
  if (memcmp(data.data(), copy.copy.data(), box.bytes()) != 0)
    fail(copy.site, "shared memory was overwritten while this %s read it: bulk_wait_read is missing before the writes",
         name_of(copy.operation));
  for (u32 row = 0; row < box.rows; ++row)
    if (char* target = box.row_address(row))
      write_row(copy, target, data.data() + row * box.row_bytes + box.first_byte, box.past_bytes - box.first_byte);
}

static void start_store(TensorOperation operation, const TensorBox& box, u32 source, u32 alignment, Site site,
                        void* caller) {
  Thread& self = running_thread();
  Block& block = *self.block;
  TensorCopy& copy = new_copy(operation, box, source, alignment, site, caller);
  copy.group = self.bulk.open_group;
  block.async_proxy.check_visible(copy.claim);
  copy.copy.resize(copy.box.bytes());
  read_box(copy, block.shared, copy.copy.data());
  record(Did::kStore, site, 0, 0, copy.box.bytes(), true);
  release(&copy.issue_order);
  {
    AsEngine engine(copy.engine);
    acquire(&copy.issue_order);
    if (kThreadSanitizer) note_read(self.shared + (source - kWindowBase), copy.box.bytes(), caller);
    release(&copy.read_order);
    note_tensor(copy);
    release(&self.bulk.written);
    release(block.request);  // the tensor is read after the launch
  }
  self.bulk.stores.push_back(&copy);
  if (lands_at_once(block)) perform_store(block, copy);
}

void tensor_store(const void* map, u32 source, int rank, const int* start, bool add, Site site) {
  TensorOperation operation = add ? TensorOperation::kAdd : TensorOperation::kStore;
  for (int axis = 0; axis < rank; ++axis)  // the CUDA C++ programming guide, on the tensor memory accelerator
    if (start[axis] < 0)
      fail(site, "a %s may not begin before the tensor, and coordinate %d is %d: only its end is clipped",
           name_of(operation), axis, start[axis]);
  start_store(operation, tensor_box(map, rank, start, site), source, kBoxAlignment, site, __builtin_return_address(0));
}

void bulk_reduce_add(float* sums, u32 source, u32 bytes, Site site) {
  TensorBox box = run_box(sums, bytes, site);
  box.map.element = TensorElement::kF32;
  start_store(TensorOperation::kAdd, box, source, kRunAlignment, site, __builtin_return_address(0));
}

void bulk_store(void* destination, u32 source, u32 bytes, Site site) {
  start_store(TensorOperation::kStore, run_box(destination, bytes, site), source, kRunAlignment, site,
              __builtin_return_address(0));
}

void bulk_commit() { ++running_thread().bulk.open_group; }

void bulk_wait_read(int pending) {
  Thread& self = running_thread();
  Block& block = *self.block;
  u32 complete = self.bulk.open_group > u32(pending) ? self.bulk.open_group - u32(pending) : 0;
  size_t kept = 0;
  for (TensorCopy* copy : self.bulk.stores) {
    if (copy->group >= complete) {
      self.bulk.stores[kept++] = copy;
      continue;
    }
    perform_store(block, *copy);
    acquire(&copy->read_order);
    block.async_proxy.end(copy->claim);
    block.tensor_copies.pool.give_back(*copy);
  }
  self.bulk.stores.resize(kept);
}

void check_stores_at_exit(Thread& thread) {
  if (thread.bulk.stores.empty()) return;
  const TensorCopy& copy = *thread.bulk.stores.front();
  fail(copy.site, "the thread ends while this %s may still read shared memory: %s", name_of(copy.operation),
       copy.group == thread.bulk.open_group ? "bulk_commit is missing" : "bulk_wait_read is missing");
}

}  // namespace emulator
