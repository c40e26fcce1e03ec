// Containers of the runtime that may grow while CUDA threads run. ThreadSanitizer intercepts malloc and free and would
// attribute both to the running CUDA thread; under TSan this memory comes from mmap instead.
#pragma once
#include <stddef.h>

#include <new>
#include <vector>

namespace emulator {

void* own_allocate(size_t bytes);
void own_free(void* memory, size_t bytes);

template <class T>
struct OwnMemory {
  using value_type = T;
  OwnMemory() = default;
  template <class U>
  OwnMemory(const OwnMemory<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(own_allocate(count * sizeof(T))); }
  void deallocate(T* memory, size_t count) { own_free(memory, count * sizeof(T)); }
  bool operator==(const OwnMemory&) const { return true; }
  bool operator!=(const OwnMemory&) const { return false; }
};

template <class T>
using Vector = std::vector<T, OwnMemory<T>>;

// Objects with stable addresses while in use, which keep their memory for the next use.
template <class T>
class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    for (T* object : objects_) object->~T(), own_free(object, sizeof(T));
  }

  T& take() {
    if (free_.empty()) {
      objects_.push_back(new (own_allocate(sizeof(T))) T());
      free_.push_back(objects_.back());
    }
    T* object = free_.back();
    free_.pop_back();
    return *object;
  }
  void give_back(T& object) { free_.push_back(&object); }
  void give_all_back() { free_ = objects_; }

 private:
  Vector<T*> objects_, free_;
};

}  // namespace emulator
