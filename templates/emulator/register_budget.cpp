// setmaxnreg: moves registers between warpgroups. A warpgroup that takes more waits until others have released enough.
#include <stdio.h>

#include "block.h"

namespace emulator {

constexpr u32 kRegistersOfBlock = 65536, kGranularity = 8, kMostRegisters = 256, kFewestRegisters = 24;

// A kernel begins with the maximum number of registers for its number of threads.
void reset_registers(Block& block) {
  u32 each = kRegistersOfBlock / u32(block.threads.size()) / kGranularity * kGranularity;
  for (Warpgroup& group : block.warpgroups) {
    group.registers = each < kMostRegisters ? each : kMostRegisters;
    group.changing = 0;
  }
  block.free_registers = 0;
}

static void grant_what_is_possible(Block& block) {
  for (u32 number = 0; number < block.whole_warpgroups(); ++number) {
    Warpgroup& group = block.warpgroups[number];
    u32 need = (group.wanted - group.registers) * kWarpgroupThreads;
    if (group.changing < kWarpgroupThreads || need > block.free_registers) continue;
    block.free_registers -= need;
    group.registers = group.wanted;
    group.changing = 0;
    for (u32 i = 0; i < kWarpgroupThreads; ++i) {
      Thread& thread = block.threads[number * kWarpgroupThreads + i];
      if (thread.state == State::kRegisters) make_ready(thread);
    }
  }
}

static void check_change(const Warpgroup& group, u32 count, bool increase, Site site) {
  if (count % kGranularity || count < kFewestRegisters || count > kMostRegisters)
    fail(site, "setmaxnreg of %u registers: multiples of 8 from 24 to 256 are possible", count);
  if (group.changing) {
    if (group.wanted != count || group.change_site.line != site.line)
      fail(site, "setmaxnreg must be the same in the whole warpgroup: others are at %s:%d", group.change_site.file,
           group.change_site.line);
    return;
  }
  if (increase ? count < group.registers : count > group.registers)
    fail(site, "setmaxnreg cannot %s to %u registers: the warpgroup has %u a thread",
         increase ? "increase" : "decrease", count, group.registers);
}

void set_registers(u32 count, bool increase, Site site) {
  Thread& self = running_thread();
  Block& block = *self.block;
  Warpgroup& group = warpgroup_of(self, site);
  check_change(group, count, increase, site);
  group.wanted = count;
  group.change_site = site;
  ++group.changing;
  if (!increase) {
    if (group.changing < kWarpgroupThreads) return;
    block.free_registers += (group.registers - count) * kWarpgroupThreads;
    group.registers = count;
    group.changing = 0;
    grant_what_is_possible(block);
    return;
  }
  grant_what_is_possible(block);
  if (group.registers != count) suspend(State::kRegisters, site);
}

int describe_register_wait(const Thread& thread, char* text, size_t room) {
  const Warpgroup& group = thread.block->warpgroups[thread.linear / kWarpgroupThreads];
  if (group.changing < kWarpgroupThreads)
    return snprintf(text, room, "wait for registers at %s:%d, where %u of the warpgroup's 128 threads have come",
                    thread.site.file, thread.site.line, group.changing);
  return snprintf(text, room, "wait for %u registers a thread at %s:%d: they have %u, and %u of the block's are free",
                  group.wanted, thread.site.file, thread.site.line, group.registers, thread.block->free_registers);
}

void check_registers_at_end(const Block& block) {
  for (const Warpgroup& group : block.warpgroups)
    if (group.changing)
      fail(group.change_site, "only %u of the warpgroup's 128 threads have executed this setmaxnreg", group.changing);
}

}  // namespace emulator
