#include "ready_queue.h"

#include "block.h"

namespace emulator {

void ReadyQueue::reset(Order order, u32 threads, u32 warps) {
  order_ = order;
  ring_.assign(threads, nullptr);
  begin_ = count_ = 0;
  // Reserved in full: growth would call memmove, which ThreadSanitizer would attribute to the running thread.
  ready_warps_.clear();
  ready_warps_.reserve(warps);
  last_warp_ = nullptr;
}

void ReadyQueue::push(Thread& thread) {
  ++count_;
  if (order_ == Order::kGreedyWarp) {
    ReadyLanes& ready = thread.in_warp->ready;
    if (ready.count == 0) ready_warps_.push_back(thread.in_warp);
    ready.lanes[ready.count++] = &thread;
    return;
  }
  u32 index = begin_ + count_ - 1;
  ring_[index < ring_.size() ? index : index - ring_.size()] = &thread;
}

Thread& ReadyQueue::pop(Random& random) {
  --count_;
  switch (order_) {
    case Order::kInOrder: {
      Thread* thread = ring_[begin_];
      begin_ = begin_ + 1 == ring_.size() ? 0 : begin_ + 1;
      return *thread;
    }
    case Order::kReverse:
      return *ring_[count_];
    case Order::kRandom: {
      u32 index = random.below(count_ + 1);
      Thread* thread = ring_[index];
      ring_[index] = ring_[count_];
      return *thread;
    }
    case Order::kGreedyWarp:
      break;
  }
  return pop_greedy(random);
}

// Stays in one warp while any of its lanes can run, so that warps drift as far apart as barriers allow.
Thread& ReadyQueue::pop_greedy(Random& random) {
  if (!last_warp_ || last_warp_->ready.count == 0) last_warp_ = ready_warps_[random.below(u32(ready_warps_.size()))];
  ReadyLanes& ready = last_warp_->ready;
  u32 index = random.below(ready.count);
  Thread* thread = ready.lanes[index];
  ready.lanes[index] = ready.lanes[--ready.count];
  if (ready.count == 0) {
    for (Warp*& warp : ready_warps_) {
      if (warp != last_warp_) continue;
      warp = ready_warps_.back();
      ready_warps_.pop_back();
      break;
    }
  }
  return *thread;
}

}  // namespace emulator
