// wgmma: the products that a warpgroup has in flight, and the accumulators they work on.
#pragma once
#include "async_proxy.h"
#include "sanitizers.h"

namespace emulator {

struct Block;
struct Thread;

constexpr u32 kWarpgroupThreads = 128, kWarpgroupWarps = 4, kMaxColumns = 256;

// A matrix of 64 rows that wgmmas in flight accumulate in. Its registers hold NaN until their thread has waited.
struct Accumulator {
  int columns;
  u32 holders;                           // threads that have not waited yet
  float* registers[kWarpgroupThreads];   // null: not this thread's, or waited for
  u64 last_group[kWarpgroupThreads];     // the last that works on it
  Vector<float> values;                  // 64 x columns
};

// One wgmma, from the first thread that issues it until the first that has waited for it.
struct MatrixProduct {
  WarpgroupProduct what;
  Accumulator* accumulator;
  Thread* first;
  Site site;
  void* caller;
  u64 group;
  u32 arrived;
  u32 warps;  // a bit for each that has begun to issue it
  bool done;
  Claim a_rows[kWarpgroupWarps], b_tile;  // each warp reads its own 16 rows of a
  u16 a[64][16], b[kMaxColumns][16];      // as they were at the issue; they must not change until it is done
};

// Room to do one product in.
struct ProductWorkspace {
  u16 tile[kMaxColumns * 16];
  float b[16][kMaxColumns];
};

struct Warpgroup {
  // Groups take turns with these: what works on one must not be taken to know what works on the next.
  static constexpr u32 kEngines = 4, kOrders = 16;

  Vector<MatrixProduct*> products;  // issued and not waited for, oldest first
  u64 first_product = 0;            // number of the oldest
  Vector<Accumulator*> accumulators;
  // A warp's wait says nothing of what its product reads and writes for the other warps.
  Engine operand_engines[kEngines], register_engines[kWarpgroupWarps][kEngines];
  char group_order[kWarpgroupWarps][kOrders];  // by group, in turn
  u32 registers = 0;          // of each thread
  u32 changing = 0;           // threads that have come to a setmaxnreg which is not complete
  u32 wanted = 0;
  Site change_site{};
};

// A thread's own view of its warpgroup's work.
struct WarpgroupMember {
  u64 issued = 0, open_group = 0, ordered_groups = 0, awaited_groups = 0;
  bool fenced = false;
  char fence_order, issue_order;
};

// ---- wgmma_accumulators.cpp, wgmma_operands.cpp, wgmma_multiply.cpp ----
void hold_accumulator(Warpgroup& group, Thread& self, MatrixProduct& product, float* d);
void release_accumulators(Block& block, Warpgroup& group, u32 rank, u64 complete);  // of groups before `complete`
void begin_operands(Thread& self, Warpgroup& group, MatrixProduct& product);
void take_a_registers(MatrixProduct& product, u32 rank, const u32* a);
void check_operands_unchanged(const MatrixProduct& product, ProductWorkspace& workspace);
void multiply_tiles(MatrixProduct& product, ProductWorkspace& workspace);

}  // namespace emulator
