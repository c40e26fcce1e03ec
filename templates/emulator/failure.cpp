// Failure of a launch: the message, and leaving the block with its threads where they are.
#include <stdarg.h>
#include <stdio.h>

#include "block.h"

namespace emulator {

[[noreturn]] void abandon_block(Block& block) {
  first_of_cluster(block).failed = true;
  switch_fiber(executing_thread().carrier->fiber, first_of_cluster(block).worker);
  __builtin_unreachable();
}

void fail(Site site, const char* format, ...) {
  Block& block = *running_thread().block;
  AsEngine running(Engine{executing_thread().carrier->fiber.tsan});  // also ends the identity of an engine
  const Thread& self = block.blamed ? *block.blamed : running_thread();
  char what[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  const uint3 &b = self.block_index, &t = self.thread_index;
  snprintf(first_of_cluster(block).message, sizeof block.message, "%s:%d: %s [block (%u, %u, %u), thread (%u, %u, %u), warp %u, lane %u]",
           site.file, site.line, what, b.x, b.y, b.z, t.x, t.y, t.z, self.warp, self.lane);
  abandon_block(block);
}

static bool waits_equally(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  if (a.state == State::kMbarrier && a.mbarrier != b.mbarrier) return false;
  return a.state == State::kFinished || (a.site.line == b.site.line && a.site.file == b.site.file);
}

static int describe(const Block& block, const Thread& thread, char* text, size_t room) {
  switch (thread.state) {
    case State::kWarpCollective:
      return snprintf(text, room, "wait for their warp at %s:%d", thread.site.file, thread.site.line);
    case State::kBlockBarrier:
      return snprintf(text, room, "wait at barrier %d, %s:%d (%u of %u have arrived)", thread.barrier, thread.site.file,
                      thread.site.line, block.barriers[thread.barrier].arrived,
                      thread.barrier ? block.barriers[thread.barrier].count : block.alive);
    case State::kClusterBarrier:
      return snprintf(text, room, "wait for their cluster at %s:%d (%u of %u have arrived)", thread.site.file,
                      thread.site.line, block.cluster->arrived, block.cluster->alive);
    case State::kMbarrier:
      return describe_mbarrier_wait(thread, text, room);
    case State::kProducts:
      return describe_product_wait(thread, text, room);
    case State::kRegisters:
      return describe_register_wait(thread, text, room);
    case State::kPolls:
      return snprintf(text, room, "wait for other blocks at %s:%d", thread.site.file, thread.site.line);
    case State::kFinished:
      return snprintf(text, room, "have ended");
    case State::kReady:
      break;
  }
  return snprintf(text, room, "are ready");
}

// Writes one line for each sequence of neighbouring threads of a block that wait at the same line.
static size_t describe_threads(const Block& block, char* text, size_t room, size_t used) {
  for (size_t first = 0; first < block.threads.size() && used + 400 < room;) {
    size_t last = first;
    while (last + 1 < block.threads.size() && waits_equally(block.threads[last + 1], block.threads[first])) ++last;
    used += size_t(snprintf(text + used, room - used, "\n  threads %zu to %zu ", first, last));
    used += size_t(describe(block, block.threads[first], text + used, room - used));
    first = last + 1;
  }
  return used;
}

static const Thread* unfinished_thread(const Cluster& cluster) {
  for (const Block* block : cluster.blocks)
    for (const Thread& thread : block->threads)
      if (thread.state != State::kFinished) return &thread;
  return nullptr;
}

void report_deadlock(Block& block) {
  const Cluster& cluster = *block.cluster;
  const Thread& waiting = *unfinished_thread(cluster);
  const uint3& b = waiting.block->index;
  char* text = first_of_cluster(block).message;
  size_t room = sizeof block.message;
  size_t used = size_t(snprintf(text, room, "%s:%d: deadlock: no thread can go on [block (%u, %u, %u)]",
                                waiting.site.file, waiting.site.line, b.x, b.y, b.z));
  for (const Block* each : cluster.blocks) {
    if (cluster.blocks.size() > 1 && used + 400 < room)
      used += size_t(snprintf(text + used, room - used, "\n block %u of the cluster:", each->rank));
    used = describe_threads(*each, text, room, used);
  }
}

}  // namespace emulator
