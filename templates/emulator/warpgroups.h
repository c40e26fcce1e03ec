// wgmma: the products that a warpgroup has in flight, and their accumulators.
#pragma once
#include "async_proxy.h"
#include "sanitizers.h"

namespace emulator {

struct Block;
struct Thread;

constexpr u32 kWarpgroupThreads = 128, kWarpgroupWarps = 4, kMaxColumns = 256;

// A matrix of 64 rows in which wgmmas in flight accumulate. Its registers hold NaN until their thread has waited.
struct Accumulator {
  int columns;
  u32 holders;                           // threads that have not waited yet
  float* registers[kWarpgroupThreads];   // null for threads that do not take part or have waited
  u64 last_group[kWarpgroupThreads];     // last group that accumulates in it
  Vector<float> values;                  // 64 x columns
};

// A wgmma, from its issue by the first thread until the first thread has waited for it.
struct MatrixProduct {
  WarpgroupProduct what;
  Accumulator* accumulator;
  Thread* first;
  Site site;
  void* caller;
  u64 group;
  u32 arrived;
  u32 warps;  // bit mask of the warps that have begun to issue it
  bool done;
  Claim a_rows[kWarpgroupWarps], b_tile;  // each warp reads its own 16 rows of a
  u16 a[64][16], b[kMaxColumns][16];      // contents at the issue, which must not change until it is performed
};

// Scratch memory for one product.
struct ProductWorkspace {
  u16 tile[kMaxColumns * 16];
  float b[16][kMaxColumns];
};

struct Warpgroup {
  // Groups use these cyclically, so that one group is not ordered after the previous one.
  static constexpr u32 kEngines = 4, kOrders = 16;

  Vector<MatrixProduct*> products;  // issued and not waited for, oldest first
  u64 first_product = 0;            // number of the oldest product
  Vector<Accumulator*> accumulators;
  // By warp, since the wait of a warp guarantees nothing about accesses for the other warps.
  Engine operand_engines[kEngines], register_engines[kWarpgroupWarps][kEngines];
  char group_order[kWarpgroupWarps][kOrders];  // by group, cyclically
  u32 registers = 0;          // of each thread
  u32 changing = 0;           // threads that have reached an incomplete setmaxnreg
  u32 wanted = 0;
  Site change_site{};
};

// The state of a thread within its warpgroup.
struct WarpgroupMember {
  u64 issued = 0, open_group = 0, ordered_groups = 0, awaited_groups = 0;
  bool fenced = false;
  char fence_order, issue_order;
};

// ---- wgmma_accumulators.cpp, wgmma_operands.cpp, wgmma_multiply.cpp ----
constexpr u64 kNoGroup = ~0ull;
u64 hold_accumulator(Warpgroup& group, Thread& self, MatrixProduct& product, float* d);
void release_accumulators(Block& block, Warpgroup& group, u32 rank, u64 complete);  // of groups before `complete`
void begin_operands(Thread& self, Warpgroup& group, MatrixProduct& product);
void take_a_registers(MatrixProduct& product, u32 rank, const u32* a);
void check_operands_unchanged(const MatrixProduct& product, ProductWorkspace& workspace);
void multiply_tiles(MatrixProduct& product, ProductWorkspace& workspace);

}  // namespace emulator
