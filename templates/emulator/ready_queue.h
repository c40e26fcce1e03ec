// Schedules: which thread runs next. Each order is legal on a GPU, and each exposes different mistakes.
#pragma once
#include <vector>

#include "vector_types.h"
#include "interface.h"

namespace emulator {

struct Thread;
struct Warp;

// Keep in step with flashgen/runtime/schedule.py.
enum class Order : u32 { kInOrder, kReverse, kRandom, kGreedyWarp };

// xorshift64*: small, seeded, the same on every machine.
struct Random {
  u64 state = 1;
  void seed(u64 value) { state = (value + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull | 1; }
  u32 below(u32 bound) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return u32((state * 0x2545f4914f6cdd1dull >> 32) * bound >> 32);
  }
};

// The ready lanes of one warp, for the greedy order.
struct ReadyLanes {
  Thread* lanes[32];
  u32 count = 0;
};

class ReadyQueue {
 public:
  void reset(Order order, u32 threads, u32 warps);
  bool empty() const { return count_ == 0; }
  void push(Thread& thread);
  Thread& pop(Random& random);

 private:
  Thread& pop_greedy(Random& random);

  Order order_ = Order::kInOrder;
  // A ring with an entry per thread. Only in_order moves its beginning.
  std::vector<Thread*> ring_;
  u32 begin_ = 0, count_ = 0;
  std::vector<Warp*> ready_warps_;
  Warp* last_warp_ = nullptr;
};

}  // namespace emulator
