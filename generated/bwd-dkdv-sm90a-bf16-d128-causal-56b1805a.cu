// flashgen: attention backward, dkdv, bf16-d128-causal-56b1805a
// Computes dK and dV, and dQ; a block iterates over the queries of a key tile.
//
// mask     causal()
// score    none; scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32
// target   sm_90a, family hopper
// plan     64 queries x 128 keys, 2 warpgroups of 232 registers, the next scores early, 3 stages of Q and dO, 231144 bytes of shared memory
// FLOPs    1280 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      1800 * batch * heads_q * len_q + 1024 * batch * heads_kv * len_k bytes, at least
//
// Grid: persistent, one block per multiprocessor; work tiles are (key tile, KV head, batch). Reproduce with
//   flashgen show --pass backward --kernel dkdv --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":null,"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct alignas(64) TensorMap {   // a CUtensorMap, which describes an array to TMA
  unsigned long long words[16];
};

struct BackwardDkdvArguments {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap d_o_map;
  TensorMap dk_map;
  TensorMap dv_map;
  const float* statistics;   // (batch, heads_q, rows, 2): base-2 LSE and D
  float* dq_accum;   // (batch, heads_q, rows, padded head_dim), in fragment order
  unsigned* dq_semaphore;   // (batch, heads_q, rows / tile): the CTA that adds next
  unsigned* dq_added;   // (batch, heads_q): CTAs that have added all of their dQ
  unsigned* dq_next;   // (1): the next group of dq rows to convert
  Element* dq;
  unsigned* next_tile;   // index of the next work tile; 0 before and after a launch
  Strides dq_strides;
  int tiles;   // work tiles: key tiles of all heads and batches
  int tiles_k;   // key tiles of a head
  int heads;   // heads of a sequence with work tiles of their own: KV heads, or query heads
  int heads_at_once;   // heads with enough work tiles for all multiprocessors
  int batch;
  int heads_q;
  int heads_per_kv;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDimPadded = 128;   // a multiple of the depth of a wgmma; zeros beyond head_dim
constexpr int kValueDimPadded = 128;
constexpr int kConsumers = 2;   // warpgroups that compute; one more loads
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPartK = 64;   // keys of a warpgroup. Scores are held transposed: a row is a key, a column a query
constexpr int kTileK = kConsumers * kPartK;   // keys of a block
constexpr int kTileQ = 64;   // queries of a step
constexpr int kQueryTiles = kTileQ / 8;   // groups of a lane's columns
constexpr int kStages = 3;   // tiles of Q, and of dO, that shared memory holds at once
constexpr int kScoreStages = 2;   // tiles of dS: one is written while dQ is made of the other
constexpr float kScale = 0.0883883461f;
constexpr float kScoreToLog2 = 0.127517432f;   // scale * log2(e): probabilities are powers of 2
constexpr float kNoLse = 3.40282347e+38f;     // marks a row without allowed scores
constexpr float kLargeLse = 4096.0f;     // to the base 2; the rounding of larger ones is visible in P
constexpr float kLseRounding = 2.38418579e-07f;   // 2^-22: relative error of an LSE and the products that it is compared with

// The tests that the scores of a tile need.
//   kNone: none, since all scores are allowed.
//   kMask: the mask.
//   kAll: all tests, since the tile extends beyond the last row or an LSE is large.
enum class Tests { kNone, kMask, kAll };

// The warpgroups divide a tile of dQ: into so many parts of 64 rows, and the rest into parts of its columns.
constexpr int kGradientRowParts = kTileQ / 64;
constexpr int kGradientColumnParts = kConsumers / kGradientRowParts;
constexpr int kGradientColumns = kHeadDimPadded / kGradientColumnParts;
constexpr int kPartBytes = 16 * kGradientColumns * sizeof(float);   // of a warp's part
constexpr int kAdders = 1;   // threads that add up dQ
constexpr int kFinishedRows = 16;   // of dQ that a warp finishes at once: few, so that in the end all warps have some

// A tile is panels of columns side by side, as wide as TMA swizzles them: 16-byte chunks of a row exchanged within a panel.
constexpr int kHeadPanel = 64;    // columns of Q, K and dK
constexpr int kValuePanel = 64;   // columns of dO, V and dV
constexpr int kElementBytes = sizeof(Element);
static_assert(kGradientColumns % kHeadPanel == 0, "whole panels of dQ's columns");

// Shared memory of a block, 231144 bytes, by offset:
//        0  K, 32768 bytes
//    32768  V, 32768 bytes
//    65536  Q, 3 x 16384 bytes
//   114688  dO, 3 x 16384 bytes
//   163840  dS, 2 x 16384 bytes; a panel of 64 keys for each warpgroup
//   196608  dQ, 32768 bytes; the parts of the warps side by side
//   229376  L, D, 3 x 512 bytes
//   230912  mbarriers, 200 bytes
//   231112  work tile, 2 x 16 bytes
//   196608  dK, 32768 bytes, overlays dQ
//    32768  dV, 32768 bytes, overlays V
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kOutputBytes = kTileQ * kValueDimPadded * kElementBytes;
constexpr int kScoreBytes = kTileQ * kTileK * kElementBytes;
constexpr int kGradientBytes = kTileQ * kHeadDimPadded * sizeof(float);
constexpr int kStatisticsBytes = kTileQ * sizeof(float2);
constexpr int kBarrierBytes = (4 * kStages + 2 * kScoreStages + 1 + 2 + 2 + 2 * 2) * 8;
constexpr int kWorkTileBytes = 16;
constexpr int kValueOffset = kKeyBytes;
constexpr int kQueryOffset = kValueOffset + kValueBytes;
constexpr int kOutputOffset = kQueryOffset + kStages * kQueryBytes;
constexpr int kScoreOffset = kOutputOffset + kStages * kOutputBytes;
constexpr int kGradientOffset = kScoreOffset + kScoreStages * kScoreBytes;
constexpr int kStatisticsOffset = kGradientOffset + kGradientBytes;
constexpr int kBarrierOffset = kStatisticsOffset + kStages * kStatisticsBytes;
constexpr int kWorkTileOffset = kBarrierOffset + kBarrierBytes;
static_assert(kWorkTileOffset + 2 * kWorkTileBytes <= 231144, "the shared memory of the launch");

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Commits this thread's bulk stores and reductions since the last commit as a group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Starts a copy of contiguous bytes, a multiple of 16, to shared memory. They complete a transaction of the mbarrier.
__device__ __forceinline__ void bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Starts the addition of contiguous floats in shared memory, a multiple of 16 bytes, to floats in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* sums, unsigned source, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(sums), "r"(source), "r"(bytes) : "memory");
}

// Starts a copy of contiguous bytes, a multiple of 16, from shared to global memory.
__device__ __forceinline__ void bulk_store(void* destination, unsigned source, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(destination), "r"(source), "r"(bytes) : "memory");
}

// Waits until all but the latest kPending groups of this thread's bulk stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
}

// Waits for this thread's bulk reductions to complete, and adds to a counter. They are visible to a thread that
// acquires it.
__device__ __forceinline__ void counter_add(unsigned* counter, unsigned amount) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
}

// Waits until a counter is at least `target`. Bulk reductions that precede its increments are then visible to this
// thread.
__device__ __forceinline__ void counter_wait(const unsigned* counter, unsigned target) {
  unsigned value;
  for (;; __nanosleep(200)) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    if (value >= target) return;
  }
}

// Returns true in one lane of the warp.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
  return elected;
}

// Returns 2 to the power of x, from the special-function unit.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Makes this thread's writes to shared memory visible to TMA and wgmma, which use the asynchronous proxy.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at the barrier's current phase.
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives at the barrier's current phase, which in addition waits for copies of so many bytes.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Initialises the 8 bytes at `barrier`. A phase completes after this many arrivals and the bytes expected in it.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA. Other threads see them after a __syncthreads.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits until the phase of this parity has completed. The first phase has parity 0. On a new barrier, a wait for parity
// 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile("{\n\t.reg .pred done;\n"
               "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
               "@!done bra again;\n\t}" :: "r"(barrier), "r"(parity) : "memory");
}

// Arrives at barrier `id` and waits until this many threads have arrived. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
  asm volatile("barrier.sync.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Returns the value in a way that the compiler cannot see through, so that it recomputes what depends on the value
// instead of holding it in registers.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Keeps the compiler from moving uses of these registers across this point, since wgmmas access them asynchronously.
template <int kCount>
__device__ __forceinline__ void order_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i]) :: "memory");
}

// Rounds two floats to nearest even and packs them in a register, `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Releases this warpgroup's registers beyond kRegisters per thread.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

// Raises this warpgroup's registers to kRegisters per thread, and waits until other warpgroups have released enough.
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

// Waits for this thread's bulk reductions to complete, and advances a semaphore from `value` to value + 1.
__device__ __forceinline__ void semaphore_release(unsigned* semaphore, unsigned value) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(semaphore), "r"(value + 1) : "memory");
}

// Returns whether a semaphore is at least `value`. If so, later bulk reductions of this thread are ordered after those
// that precede the release of the semaphore.
__device__ __forceinline__ bool semaphore_test(const unsigned* semaphore, unsigned value) {
  unsigned current;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(current) : "l"(semaphore) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return current >= value;
}

// Waits until a semaphore is at least `value`. Later bulk reductions of this thread are ordered after those that
// precede the release of the semaphore.
__device__ __forceinline__ void semaphore_wait(const unsigned* semaphore, unsigned value) {
  unsigned current;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(current) : "l"(semaphore) : "memory");
  } while (current < value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Returns the 32-bit address of `pointer` in the shared-memory window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// stmatrix: stores four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(unsigned destination, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
               :: "r"(destination), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// stmatrix with transposition: transposes and stores four 8x8 matrices of 16-bit elements. Lane l gives the address of
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4_transposed(unsigned destination, unsigned r0, unsigned r1, unsigned r2,
                                                           unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};"
               :: "r"(destination), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// Starts a copy of the box at coordinates (c0, ...) of a tensor to shared memory, with zeros for elements outside of
// the tensor. Its bytes complete a transaction of the mbarrier.
__device__ __forceinline__ void tma_load_4d(unsigned destination, const TensorMap& map, unsigned barrier, int c0, int c1,
                                            int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, { %3, %4, %5, %6}], [%2];"
               :: "r"(destination), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Starts a copy of a box in shared memory to coordinates (c0, ...) of a tensor, clipped to the tensor.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, unsigned source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Commits this warpgroup's wgmmas since the last commit as a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Orders this warpgroup's register accesses before those of the following wgmmas.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Starts d (64 x kN, float32) = a (64 x 16) * b (16 x kN), plus d if `accumulate`. a is in registers, as for
// mma.m16n8k16. b is the descriptor of a shared-memory tile, the rows of which run along the depth if kTransposedB. d
// is valid after the group of the wgmma is complete.
template <int kN, bool kTransposedB>
__device__ __forceinline__ void wgmma_registers_bf16(float (&d)[kN / 2], const unsigned (&a)[4], unsigned long long b,
                                                     bool accumulate);
template <>
__device__ __forceinline__ void wgmma_registers_bf16<128, true>(
    float (&d)[64], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23, "
               " %24, %25, %26, %27, %28, %29, %30, %31, "
               " %32, %33, %34, %35, %36, %37, %38, %39, "
               " %40, %41, %42, %43, %44, %45, %46, %47, "
               " %48, %49, %50, %51, %52, %53, %54, %55, "
               " %56, %57, %58, %59, %60, %61, %62, %63"
               "}, { %64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Starts d (64 x kN, float32) = a (64 x 16) * b (16 x kN), plus d if `accumulate`. a and b are descriptors of
// shared-memory tiles. The rows of b run along the depth if kTransposedB. d is valid after the group of the wgmma is
// complete.
template <int kN, bool kTransposedB>
__device__ __forceinline__ void wgmma_shared_bf16(float (&d)[kN / 2], unsigned long long a, unsigned long long b,
                                                  bool accumulate);
template <>
__device__ __forceinline__ void wgmma_shared_bf16<64, false>(
    float (&d)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23, "
               " %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, p, 1, 1, 0, 0;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_shared_bf16<64, true>(
    float (&d)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23, "
               " %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, p, 1, 1, 0, 1;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Waits until all but the latest kPending groups of this warpgroup's wgmmas are complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
}

#endif

// Returns the descriptor of a shared-memory tile for wgmma (PTX ISA, "matrix descriptor"): its address, the distances
// between its panels (leading, unused if rows run along the depth) and between its groups of 8 rows (stride), and the
// swizzle of its 16-byte chunks.
template <int kSwizzleBytes>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address, unsigned leading_bytes,
                                                                unsigned stride_bytes) {
  constexpr unsigned long long kMode = kSwizzleBytes == 128 ? 1 : kSwizzleBytes == 64 ? 2 : kSwizzleBytes == 32 ? 3 : 0;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 | kMode << 62;
}

// Transposes the values of four lanes: value j of lane i becomes value i of lane j.
__device__ __forceinline__ void quad_transpose(unsigned (&values)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? values[i] : values[i + distance], distance);
      (upper ? values[i] : values[i + distance]) = other;
    }
  }
}

// The mbarriers of a block, by their addresses in shared memory. `use` numbers the uses of a pipeline's stages in turn.
struct Barriers {
  unsigned first;

  // A stage of Q and of the rows' statistics has landed, and has been released; the same of dO.
  __device__ __forceinline__ unsigned queries_full(int use) const { return first + use % kStages * 32; }
  __device__ __forceinline__ unsigned queries_empty(int use) const { return first + 8 + use % kStages * 32; }
  __device__ __forceinline__ unsigned outputs_full(int use) const { return first + 16 + use % kStages * 32; }
  __device__ __forceinline__ unsigned outputs_empty(int use) const { return first + 24 + use % kStages * 32; }
  static __device__ __forceinline__ unsigned phase(int use) { return use / kStages & 1; }

  // Every consumer warp has written its part of dS, and has read dS.
  __device__ __forceinline__ unsigned scores_full(int use) const {
    return first + kStages * 32 + use % kScoreStages * 16;
  }
  __device__ __forceinline__ unsigned scores_empty(int use) const {
    return first + kStages * 32 + 8 + use % kScoreStages * 16;
  }
  static __device__ __forceinline__ unsigned score_phase(int use) { return use / kScoreStages & 1; }

  // The previous tile of dQ has been added to global memory, so that its buffer is free.
  __device__ __forceinline__ unsigned gradients_empty() const { return first + kStages * 32 + kScoreStages * 16; }

  // Every consumer warp has written its part of a tile of dQ, of an even step and of an odd one.
  __device__ __forceinline__ unsigned gradients_full(int use) const {
    return first + kStages * 32 + kScoreStages * 16 + 8 + use % 2 * 8;
  }

  // Every consumer warp has released K of a work tile; the same of V.
  __device__ __forceinline__ unsigned keys_empty() const { return first + kStages * 32 + kScoreStages * 16 + 24; }
  __device__ __forceinline__ unsigned values_empty() const { return first + kStages * 32 + kScoreStages * 16 + 32; }

  // The coordinates of a work tile are written, and have been read.
  __device__ __forceinline__ unsigned work_tile_full(int use) const {
    return first + kStages * 32 + kScoreStages * 16 + 40 + use % 2 * 16;
  }
  __device__ __forceinline__ unsigned work_tile_empty(int use) const {
    return first + kStages * 32 + kScoreStages * 16 + 48 + use % 2 * 16;
  }

  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(queries_full(stage), 1);
      mbarrier_init(queries_empty(stage), kConsumers * 4);
      mbarrier_init(outputs_full(stage), 1);
      mbarrier_init(outputs_empty(stage), kConsumers * 4);
    }
    for (int stage = 0; stage < kScoreStages; ++stage) {
      mbarrier_init(scores_full(stage), kConsumers * 4);
      mbarrier_init(scores_empty(stage), kConsumers * 4);
    }
    mbarrier_init(gradients_empty(), 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(gradients_full(stage), kConsumers * 4);
    }
    mbarrier_init(keys_empty(), kConsumers * 4);
    mbarrier_init(values_empty(), kConsumers * 4);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(work_tile_full(stage), 1);
      mbarrier_init(work_tile_empty(stage), kConsumers * 4 + kAdders);
    }
    mbarrier_fence_init();
  }
};

// One lane of each warp says that the warp is done with something.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Starts copying kRows rows, from first_row on, panel by panel; they arrive at the barrier.
template <int kRows, int kColumns, int kPanel>
__device__ __forceinline__ void load_rows(unsigned tile, const TensorMap& map, unsigned barrier, int first_row, int head,
                                          int batch) {
#pragma unroll 1   // this thread has few registers
  for (int column = 0; column < kColumns; column += kPanel) {
    tma_load_4d(tile + column * kRows * kElementBytes, map, barrier, column, first_row, head, batch);
  }
}

// Rounds a warp's 16 rows and stores them, by way of shared memory, where they are the first of each panel of columns, which
// holds kPanelRows, swizzled as TMA does it. Rows beyond the last are clipped.
template <int kColumns, int kPanel, int kPanelRows>
__device__ __forceinline__ void store_rows(const float (&values)[kColumns / 2], float factor, unsigned tile,
                                           const TensorMap& map, int first_row, int head, int batch) {
  constexpr int kChunks = kPanel / 8;   // 16-byte chunks of a panel's row
  const int lane = threadIdx.x % 32, row = lane % 16, swizzle = row / (8 / kChunks) % kChunks;
#pragma unroll
  for (int n = 0; n < kColumns / 2; n += 8) {
    const int panel = n / 4 / kChunks, chunk = (n / 4 % kChunks + lane / 16) ^ swizzle;
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(values[n + 2 * i] * factor, values[n + 2 * i + 1] * factor);
    store_matrix_x4(tile + ((panel * kPanelRows + row) * kChunks + chunk) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int column = 0; column < kColumns; column += kPanel) {
      tma_store_4d(map, tile + column * kPanelRows * kElementBytes, column, first_row, head, batch);
    }
    bulk_commit();
  }
}

// Starts product = A * B^T, the rows of both along the depth: 64 rows of a panel of kRowsA, kRowsB rows.
template <int kDepth, int kPanel, int kRowsA, int kRowsB>
__device__ __forceinline__ void start_product(float (&product)[kRowsB / 2], unsigned a_tile, unsigned b_tile) {
  constexpr int kSwizzle = kPanel * kElementBytes;
  order_registers(product);
  wgmma_fence();
  const unsigned long long a = matrix_descriptor<kSwizzle>(a_tile, 16, 8 * kSwizzle);
  const unsigned long long b = matrix_descriptor<kSwizzle>(b_tile, 16, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    const int panel = depth / kPanel, column = depth % kPanel;   // descriptors count in 16 bytes
    wgmma_shared_bf16<kRowsB, false>(product, a + (panel * kRowsA * kSwizzle + column * kElementBytes) / 16,
                                    b + (panel * kRowsB * kSwizzle + column * kElementBytes) / 16, depth > 0);
  }
  wgmma_commit();
}

// Starts product += A * B, A in registers; the rows of B, kDepth in all, run along the depth.
template <int kColumns, int kPanel, int kDepth>
__device__ __forceinline__ void start_sum(float (&product)[kColumns / 2], const unsigned (&a)[kDepth / 16][4],
                                          unsigned b_tile) {
  constexpr int kSwizzle = kPanel * kElementBytes;
  order_registers(product);
  wgmma_fence();
  const unsigned long long b = matrix_descriptor<kSwizzle>(b_tile, kDepth * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    wgmma_registers_bf16<kColumns, true>(product, a[depth / 16], b + depth * kSwizzle / 16, true);
  }
  wgmma_commit();
}

// Waits until the product has been computed, with at most kPending younger groups of wgmmas still running.
template <int kPending, int kCount>
__device__ __forceinline__ void await_product(float (&product)[kCount]) {
  wgmma_wait<kPending>();
  order_registers(product);
}

// Lays down 16 rows of a warp, 8 columns after 8, as lanes hold them.
template <int kColumns>
__device__ __forceinline__ void lay_down(const float (&rows)[kColumns / 2], void* place) {
  unsigned char* const lane = static_cast<unsigned char*>(place) + threadIdx.x % 32 * 16;
#pragma unroll
  for (int n = 0; n < kColumns / 2; n += 4) {
    *reinterpret_cast<float4*>(lane + n * 128) = make_float4(rows[n], rows[n + 1], rows[n + 2], rows[n + 3]);
  }
}

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, the lane's first query and its first key within a tile.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const BackwardDkdvArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// What a block works on: a tile of keys of one head of K and V of one batch, for all query heads of its group.
struct WorkTile {
  int first_key, head_kv, batch;
};

static_assert(sizeof(WorkTile) <= kWorkTileBytes, "the room of a work tile in shared memory");

// Where the loading thread tells a work, two of them at a time. One that begins before the first key is none: the block ends.
__device__ __forceinline__ WorkTile& work_tile_slot(int turn) {
  return reinterpret_cast<WorkTile*>(shared_memory + kWorkTileOffset)[turn % 2];
}

// The work of a number: tile after tile, then the next head of K and V of all batches. Of the last heads, as many as
// fill the card, the first tiles of all come before the second ones: most masks give those the most queries, and blocks end
// together where what is left is short.
__device__ __forceinline__ WorkTile work_tile_at(unsigned number, const BackwardDkdvArguments& arguments) {
  const int heads = arguments.tiles / arguments.tiles_k, last = min(arguments.heads_at_once, heads);
  const int place = number - (heads - last) * arguments.tiles_k;   // among those of the last heads
  const int tile = place < 0 ? number % arguments.tiles_k : place / last;
  const int head = place < 0 ? number / arguments.tiles_k : heads - last + place % last;
  return {tile * kTileK, head % arguments.heads, head / arguments.heads};
}

// The query tiles that a key tile visits. Those from full_begin to full_end need no mask.
struct QueryTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_query(int step) const { return (begin + step) * kTileQ; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

__device__ __forceinline__ QueryTiles query_tiles_of(const WorkTile& work, int head, const BackwardDkdvArguments& arguments) {
  const int k_first = work.first_key;
  const int k_last = min(work.first_key + kTileK, arguments.len_k) - 1;
  // The bounds are half-open ranges of queries.
  const int begin = max(0, k_first + arguments.len_q - arguments.len_k);
  const int end = arguments.len_q;
  const int full_begin = max(0, k_last + arguments.len_q - arguments.len_k);
  const int full_end = arguments.len_q;
  const int first_tile = begin / kTileQ;
  const int count = end > begin ? (end + kTileQ - 1) / kTileQ - first_tile : 0;
  return {first_tile, count, (full_begin + kTileQ - 1) / kTileQ, full_end / kTileQ};
}

// A walk along the tiles of queries that attend to a block's keys, head by head of the group. Each is a step.
struct Walk {
  QueryTiles tiles;
  int member, step;

  __device__ __forceinline__ Walk(const WorkTile& work, const BackwardDkdvArguments& arguments)
      : tiles(query_tiles_of(work, work.head_kv * arguments.heads_per_kv, arguments)), member(0), step(0) {
    skip_empty(work, arguments);
  }

  __device__ __forceinline__ bool ended(const BackwardDkdvArguments& arguments) const {
    return member == arguments.heads_per_kv;
  }
  __device__ __forceinline__ int head(const WorkTile& work, const BackwardDkdvArguments& arguments) const {
    return work.head_kv * arguments.heads_per_kv + member;
  }
  __device__ __forceinline__ int first_query() const { return tiles.first_query(step); }

  __device__ __forceinline__ void advance(const WorkTile& work, const BackwardDkdvArguments& arguments) {
    ++step;
    skip_empty(work, arguments);
  }

  // Goes on to the next head that has a step left.
  __device__ __forceinline__ void skip_empty(const WorkTile& work, const BackwardDkdvArguments& arguments) {
    while (step >= tiles.count && ++member < arguments.heads_per_kv) {
      tiles = query_tiles_of(work, head(work, arguments), arguments);
      step = 0;
    }
  }
};

// Where the tiles of a step begin in shared memory.
__device__ __forceinline__ unsigned queries_at(unsigned shared, int use) {
  return shared + kQueryOffset + use % kStages * kQueryBytes;
}

__device__ __forceinline__ unsigned outputs_at(unsigned shared, int use) {
  return shared + kOutputOffset + use % kStages * kOutputBytes;
}

__device__ __forceinline__ unsigned scores_at(unsigned shared, int use) {
  return shared + kScoreOffset + use % kScoreStages * kScoreBytes;
}

// The row of the statistics, and of the sums of dQ, at which a step begins.
__device__ __forceinline__ long long first_row(const Walk& walk, const WorkTile& work, const BackwardDkdvArguments& arguments) {
  const long long head = static_cast<long long>(work.batch) * arguments.heads_q + walk.head(work, arguments);
  return head * arguments.rows + walk.first_query();
}

// ---- The warpgroup that loads, and adds up dQ -----------------------------------------------------------------------

// Loads what a work needs, as soon as there is room: of each step Q and its rows' statistics, and dO; with the first step's K
// and V, in whose places those of the work before were, and its dV.
__device__ __forceinline__ void load_tiles(const WorkTile& work, Walk& walk, int turn, int& use, unsigned shared,
                                           const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  for (bool begins = true; !walk.ended(arguments); walk.advance(work, arguments), ++use, begins = false) {
    const int head = walk.head(work, arguments), stage = use % kStages;
    mbarrier_wait(barriers.queries_empty(use), barriers.phase(use) ^ 1);
    mbarrier_expect_bytes(barriers.queries_full(use), kQueryBytes + kStatisticsBytes + (begins ? kKeyBytes : 0));
    load_rows<kTileQ, kHeadDimPadded, kHeadPanel>(queries_at(shared, use), arguments.q_map,
                                                  barriers.queries_full(use), walk.first_query(), head, work.batch);
    bulk_load(shared + kStatisticsOffset + stage * kStatisticsBytes,
              arguments.statistics + first_row(walk, work, arguments) * 2, kStatisticsBytes, barriers.queries_full(use));
    if (begins) {
      mbarrier_wait(barriers.keys_empty(), turn & 1 ^ 1);
      load_rows<kTileK, kHeadDimPadded, kHeadPanel>(shared, arguments.k_map, barriers.queries_full(use), work.first_key,
                                                    work.head_kv, work.batch);
    }
    mbarrier_wait(barriers.outputs_empty(use), barriers.phase(use) ^ 1);
    mbarrier_expect_bytes(barriers.outputs_full(use), kOutputBytes + (begins ? kValueBytes : 0));
    load_rows<kTileQ, kValueDimPadded, kValuePanel>(outputs_at(shared, use), arguments.d_o_map,
                                                    barriers.outputs_full(use), walk.first_query(), head, work.batch);
    if (begins) {
      mbarrier_wait(barriers.values_empty(), turn & 1 ^ 1);
      load_rows<kTileK, kValueDimPadded, kValuePanel>(shared + kValueOffset, arguments.v_map, barriers.outputs_full(use),
                                                      work.first_key, work.head_kv, work.batch);
    }
  }
}

// What the loading thread does: it tells the others each work, and loads its tiles.
// A work without steps they end without waiting for a load, so that it is told when the last one has ended: of two phases
// that end unseen, one would be taken for the other.
__device__ __forceinline__ void load_works(unsigned shared, const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  for (int turn = 0, use = 0;; ++turn) {
    // The next work that no other block has taken. Each takes one too many: the last of these wraps the counter to 0.
    const unsigned number = atomicInc(arguments.next_tile, arguments.tiles + gridDim.x - 1);
    mbarrier_wait(barriers.work_tile_empty(turn), turn / 2 & 1 ^ 1);
    WorkTile& work = work_tile_slot(turn);
    if (number >= arguments.tiles) {
      work.first_key = -1;
      mbarrier_arrive(barriers.work_tile_full(turn));
      return;
    }
    work = work_tile_at(number, arguments);
    Walk walk(work, arguments);
    if (walk.ended(arguments)) {
      mbarrier_wait(barriers.keys_empty(), turn & 1 ^ 1);
      mbarrier_wait(barriers.values_empty(), turn & 1 ^ 1);
    }
    mbarrier_arrive(barriers.work_tile_full(turn));
    load_tiles(work, walk, turn, use, shared, barriers, arguments);
  }
}

// What the thread does that adds up dQ: it adds each step's tile to the sums. Who comes first to a tile stores it, so that
// nobody zeroes the sums; all others add, in any order, once it is there.
__device__ __forceinline__ void add_up(const WorkTile& work, int& use, unsigned shared,
                                       const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  for (Walk walk(work, arguments); !walk.ended(arguments); walk.advance(work, arguments), ++use) {
    const long long row = first_row(walk, work, arguments);
    unsigned* const place = arguments.dq_semaphore + row / kTileQ;
    float* const sums = arguments.dq_accum + row * kHeadDimPadded;
    const bool stored = semaphore_test(place, 2);   // most of the time
    mbarrier_wait(barriers.gradients_full(use), use / 2 & 1);
    const bool first = !stored && atomicCAS(place, 0u, 1u) == 0;
    if (!stored && !first) semaphore_wait(place, 2);
    if (first) bulk_store(sums, shared + kGradientOffset, kGradientBytes);
    else bulk_reduce_add(sums, shared + kGradientOffset, kGradientBytes);
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(barriers.gradients_empty());
    if (first) semaphore_release(place, 1);
  }
}

// One work after the other; and of each head it is counted who has added all that they had.
__device__ __forceinline__ void add_up_works(unsigned shared, const Barriers& barriers,
                                             const BackwardDkdvArguments& arguments) {
  for (int turn = 0, use = 0;; ++turn) {
    mbarrier_wait(barriers.work_tile_full(turn), turn / 2 & 1);
    const WorkTile& work = work_tile_slot(turn);   // which stays there: this thread has few registers
    if (work.first_key < 0) return;
    add_up(work, use, shared, barriers, arguments);
    counter_add(arguments.dq_added + work.batch * arguments.heads + work.head_kv, 1);
    mbarrier_arrive(barriers.work_tile_empty(turn));
  }
}

// kFinishedRows rows of dQ, from their sums, by a warp: the part of that number, of all query heads of all batches. Four
// lanes have two of the rows. Rows with nothing to attend to are 0, whatever K holds, and so is a tile that nobody added to.
__device__ __forceinline__ void finish_rows(unsigned part, const BackwardDkdvArguments& arguments) {
  const unsigned parts_of_head = arguments.rows / kFinishedRows, head_of_all = part / parts_of_head;
  const long long first_row = static_cast<long long>(part) * kFinishedRows;
  const int batch = head_of_all / arguments.heads_q, head = head_of_all % arguments.heads_q;
  const int lane = threadIdx.x % 32, query = part % parts_of_head * kFinishedRows + lane / 4;
  const bool added = __ldcg(arguments.dq_semaphore + first_row / kTileQ) > 0;
  const float* const statistics = arguments.statistics + (first_row + lane / 4) * 2;
  const bool low = (statistics[0] != kNoLse) & added, high = (statistics[16] != kNoLse) & added;
  const float* const sums = arguments.dq_accum + first_row * kHeadDimPadded + lane * 4;
  Element* const gradient = arguments.dq + batch * arguments.dq_strides.batch + head * arguments.dq_strides.head +
                            query * arguments.dq_strides.row + lane % 4 * 8;
#pragma unroll 1
  for (int column = 0; column < kHeadDimPadded; column += 32) {
    unsigned rows[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // of each 8 columns these lanes have two, of both rows
      const float4 four = __ldcg(reinterpret_cast<const float4*>(sums + column * 16 + i * 128));
      rows[0][i] = low ? pack_bf16(four.x * kScale, four.y * kScale) : 0;
      rows[1][i] = high ? pack_bf16(four.z * kScale, four.w * kScale) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      quad_transpose(rows[i]);
      if (query + i * 8 >= arguments.len_q) continue;
      *reinterpret_cast<uint4*>(gradient + i * 8 * arguments.dq_strides.row + column) =
          make_uint4(rows[i][0], rows[i][1], rows[i][2], rows[i][3]);
    }
  }
}

// Turns sums into dQ, as soon as all of a head are added up: what warps do that have nothing else to do, and in the end all
// of those that computed. They take the rows one after the other.
__device__ __forceinline__ void finish(const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32;
  const unsigned parts = arguments.heads_per_kv * arguments.rows / kFinishedRows, all = arguments.batch * arguments.heads * parts;
  unsigned next = lane == 0 ? atomicAdd(arguments.dq_next, 1u) : 0, complete = 0;   // heads that it has waited for
  for (;;) {
    const unsigned part = __shfl_sync(0xffffffffu, next, 0);
    if (part >= all) return;
    const unsigned number = part / parts;
    if (lane == 0) next = atomicAdd(arguments.dq_next, 1u);   // arrives meanwhile
    if (number >= complete) {
      if (lane == 0) counter_wait(arguments.dq_added + number, arguments.tiles_k * kAdders);
      __syncwarp();
      complete = number + 1;
    }
    finish_rows(part, arguments);
  }
}

// ---- The steps of those that compute --------------------------------------------------------------------------------

// (LSE, D) of the two queries of which this lane has the scores in column group j.
__device__ __forceinline__ float4 statistics_of(const unsigned char* statistics, int j) {
  return *reinterpret_cast<const float4*>(statistics + (j * 8 + threadIdx.x % 4 * 2) * 8);
}

// Returns whether some query of a tile has a large LSE.
__device__ __forceinline__ bool has_large_lse(const unsigned char* statistics) {
  float largest = 0.0f;
  for (int row = threadIdx.x % 32; row < kTileQ; row += 32) {
    const float lse = fabsf(*reinterpret_cast<const float*>(statistics + row * 8));
    if (lse < kNoLse) largest = fmaxf(largest, lse);
  }
  return __any_sync(0xffffffffu, largest > kLargeLse);
}

// Recomputes P in place of the products Q * K^T. Scores that fail `kTests` have a P of 0. If an LSE may be large, P is
// 1 wherever it differs from 1 by no more than the rounding of the LSE.
template <Tests kTests>
__device__ __forceinline__ void recompute_p(float (&scores)[kQueryTiles * 4],
                                            const unsigned char* statistics, const Position& position,
                                            int first_query, const BackwardDkdvArguments& arguments) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const float4 rows = statistics_of(statistics, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int q = first_query + position.query + j * 8 + e % 2, k = position.key + e / 2 * 8;
      const float lse = e % 2 ? rows.z : rows.x;
      float exponent = fmaf(scores[j * 4 + e], kScoreToLog2, -lse);
      if (kTests == Tests::kAll && exponent > fabsf(lse) * -kLseRounding) exponent = 0.0f;
      const float probability = exp2_approx(exponent);
      const bool allowed = kTests == Tests::kNone ||
          (kTests == Tests::kMask || k < arguments.len_k) & mask_mod(q, k, arguments);
      scores[j * 4 + e] = allowed ? probability : 0.0f;
    }
  }
}

// Turns dP into dS = P * (dP - D) with D = rowsum(dO * O).
__device__ __forceinline__ void compute_ds(float (&d_scores)[kQueryTiles * 4],
                                           const float (&probabilities)[kQueryTiles * 4],
                                           const unsigned char* statistics) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const float4 rows = statistics_of(statistics, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d_scores[j * 4 + e] = probabilities[j * 4 + e] * (d_scores[j * 4 + e] - (e % 2 ? rows.w : rows.y));
    }
  }
}

// Scores rounded to what a product takes from registers: 16 columns of them are a fragment.
__device__ __forceinline__ void pack_scores(unsigned (&fragments)[kTileQ / 16][4], const float (&scores)[kTileQ / 2]) {
#pragma unroll
  for (int n = 0; n < kTileQ / 2; n += 2) {
    fragments[n / 8][n / 2 % 4] = pack_bf16(scores[n], scores[n + 1]);
  }
}

// Writes dS of this warp's 16 keys to a step's stage, for dQ: a row for each query; a warpgroup's keys are a panel's columns.
__device__ __forceinline__ void share_scores(const unsigned (&fragments)[kTileQ / 16][4], int warpgroup, unsigned shared,
                                             const Barriers& barriers, int use) {
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  const unsigned row = lane / 16 * 8 + lane % 8, panel = scores_at(shared, use) + warpgroup * kTileQ * 128;
  const unsigned place = panel + row * 128 + (chunk ^ lane % 8) * 16;
  mbarrier_wait(barriers.scores_empty(use), barriers.score_phase(use) ^ 1);
#pragma unroll
  for (int i = 0; i < kTileQ / 16; ++i) {
    store_matrix_x4_transposed(place + i * 16 * 128, fragments[i][0], fragments[i][1], fragments[i][2], fragments[i][3]);
  }
  fence_async_shared();
  __syncwarp();
  release(barriers.scores_full(use));
}

// Starts a warpgroup's part of a tile of dQ = dS * K.
__device__ __forceinline__ void start_query_gradients(float (&d_queries)[kGradientColumns / 2], int warpgroup,
                                                      unsigned d_scores, unsigned keys) {
  constexpr int kSwizzle = kHeadPanel * kElementBytes;
  const int row_part = warpgroup / kGradientColumnParts, column_part = warpgroup % kGradientColumnParts;
  order_registers(d_queries);
  wgmma_fence();
  const unsigned long long a = matrix_descriptor<128>(d_scores + row_part * 64 * 128, 16, 8 * 128);
  const unsigned long long b = matrix_descriptor<kSwizzle>(
      keys + column_part * (kGradientColumns / kHeadPanel) * kTileK * kSwizzle, kTileK * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kTileK; depth += 16) {
    wgmma_shared_bf16<kGradientColumns, true>(
        d_queries, a + (depth / 64 * kTileQ * 128 + depth % 64 * kElementBytes) / 16, b + depth * kSwizzle / 16, depth > 0);
  }
  wgmma_commit();
}

// A warp's part of a tile of dQ, by number: where it lies in the tile's sums, and in shared memory.
__device__ __forceinline__ int gradient_part(int warpgroup) {
  const int row_part = warpgroup / kGradientColumnParts, column_part = warpgroup % kGradientColumnParts;
  return (row_part * 4 + threadIdx.x / 32 % 4) * kGradientColumnParts + column_part;
}

// Done with a step's dS: lays this warp's part of dQ into shared memory, for the warp that adds it to the sums.
// `again`: that of another step of this work has been there.
__device__ __forceinline__ void hand_over_gradients(const float (&d_queries)[kGradientColumns / 2], int warpgroup,
                                                    const Barriers& barriers, int use, bool again) {
  release(barriers.scores_empty(use));
  if (again) mbarrier_wait(barriers.gradients_empty(), use & 1 ^ 1);
  lay_down<kGradientColumns>(d_queries, shared_memory + kGradientOffset + gradient_part(warpgroup) * kPartBytes);
  fence_async_shared();
  __syncwarp();
  release(barriers.gradients_full(use));
}

// Starts a step's scores of a warpgroup's keys, transposed: K * Q^T. `again`: they were computed before.
__device__ __forceinline__ void start_scores(float (&scores)[kTileQ / 2], int warpgroup, unsigned shared,
                                             const Barriers& barriers, int use, bool again) {
  if (!again) mbarrier_wait(barriers.queries_full(use), barriers.phase(use));
  const unsigned keys = shared + warpgroup * kPartK * kHeadPanel * kElementBytes;   // of each panel this warpgroup's
  start_product<kHeadDimPadded, kHeadPanel, kTileK, kTileQ>(scores, keys, queries_at(shared, use));
}

// Starts dP, transposed: V * dO^T.
__device__ __forceinline__ void start_probability_gradients(float (&d_scores)[kTileQ / 2], int warpgroup, unsigned shared,
                                                            const Barriers& barriers, int use, bool again) {
  if (!again) mbarrier_wait(barriers.outputs_full(use), barriers.phase(use));
  const unsigned values = shared + kValueOffset + warpgroup * kPartK * kValuePanel * kElementBytes;
  start_product<kValueDimPadded, kValuePanel, kTileK, kTileQ>(d_scores, values, outputs_at(shared, use));
}

// Scores become P, while dP is computed; and that becomes dS.
__device__ __forceinline__ void find_score_gradients(float (&scores)[kTileQ / 2], float (&d_scores)[kTileQ / 2],
                                                     const Walk& walk, int use, const WorkTile& work, const Position& position,
                                                     const BackwardDkdvArguments& arguments) {
  const int first_query = walk.first_query();
  const unsigned char* statistics = shared_memory + kStatisticsOffset + use % kStages * kStatisticsBytes;
  if (work.first_key + kTileK > arguments.len_k || has_large_lse(statistics)) {
    recompute_p<Tests::kAll>(scores, statistics, position, first_query, arguments);
  } else if (!walk.tiles.full(walk.step)) {
    recompute_p<Tests::kMask>(scores, statistics, position, first_query, arguments);
  } else {
    recompute_p<Tests::kNone>(scores, statistics, position, first_query, arguments);
  }
  await_product<0>(d_scores);
  compute_ds(d_scores, scores, statistics);
}

// Writes dK and dV. dV takes the place of V, dK that of this warp's part of dQ: the next work's K is on
// its way meanwhile.
__device__ __forceinline__ void write_gradients(const float (&d_keys)[kHeadDimPadded / 2],
                                                const float (&d_values)[kValueDimPadded / 2], const WorkTile& work,
                                                int use, bool any, int warpgroup, unsigned shared,
                                                const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  const int row = warpgroup * kPartK + threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;
  named_barrier_sync(1 + warpgroup, 128);   // its warps are done with V
  store_rows<kValueDimPadded, kValuePanel, kTileK>(
      d_values, 1.0f, shared + kValueOffset + row * kValuePanel * kElementBytes, arguments.dv_map,
      work.first_key + row, work.head_kv, work.batch);
  if (lane == 0) bulk_wait_read<0>();   // dV; and dK of the work before, if this one had no steps
  release(barriers.values_empty());
  if (any) mbarrier_wait(barriers.gradients_empty(), use & 1 ^ 1);   // the last step's dQ is added
  __syncwarp();
  store_rows<kHeadDimPadded, kHeadPanel, 16>(
      d_keys, kScale, shared + kGradientOffset + gradient_part(warpgroup) * kPartBytes, arguments.dk_map,
      work.first_key + row, work.head_kv, work.batch);
}

// The steps of a work, of which there is one at least: a warpgroup adds up dK and dV of its keys; and computes its part of
// each step's dQ, a step later, when the other's dS is there too. While it works on scores, products of the other's run.
__device__ __forceinline__ void walk_queries(float (&d_keys)[kHeadDimPadded / 2], float (&d_values)[kValueDimPadded / 2],
                                             const WorkTile& work, Walk& walk, int& use, int warpgroup, unsigned shared,
                                             const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32, key = work.first_key + warpgroup * kPartK + threadIdx.x / 32 % 4 * 16 + lane / 4;
  float scores[kTileQ / 2], d_scores[kTileQ / 2];
  float(&d_queries)[kGradientColumns / 2] = scores;   // in registers of scores, which are done with when it starts
  bool begun = false, handed = false;   // whether there is a step before, and dQ of one has been handed over
  start_scores(scores, warpgroup, shared, barriers, use, false);
  start_probability_gradients(d_scores, warpgroup, shared, barriers, use, false);
  await_product<1>(scores);
  // Where shared memory begins is found anew with each step, else registers hold all along where K and V lie.
  for (bool ended = false; !ended; ++use, shared = opaque(shared)) {
    const Position position = {work.batch, walk.head(work, arguments), lane % 4 * 2, key};
    find_score_gradients(scores, d_scores, walk, use, work, position, arguments);
    unsigned probability_fragments[kTileQ / 16][4], d_score_fragments[kTileQ / 16][4];
    pack_scores(probability_fragments, scores);
    pack_scores(d_score_fragments, d_scores);
    share_scores(d_score_fragments, warpgroup, shared, barriers, use);
    walk.advance(work, arguments);
    ended = walk.ended(arguments);

    const auto start_sums = [&] {
      start_sum<kValueDimPadded, kValuePanel, kTileQ>(d_values, probability_fragments, outputs_at(shared, use));
      start_sum<kHeadDimPadded, kHeadPanel, kTileQ>(d_keys, d_score_fragments, queries_at(shared, use));
    };
    if (begun) {
      start_query_gradients(d_queries, warpgroup, scores_at(shared, use - 1), shared);
      start_sums();
      await_product<2>(d_queries);
      hand_over_gradients(d_queries, warpgroup, barriers, use - 1, handed);
      handed = true;
    } else {
      start_sums();
      begun = true;
      if (lane == 0) bulk_wait_read<0>();   // dK of the work before, of which dQ takes the place
      __syncwarp();
    }
    // The last step's scores and dP are computed once more, for nobody: with these products in a branch none would overlap.
    const int next = ended ? use : use + 1;
    start_scores(scores, warpgroup, shared, barriers, next, ended);
    await_product<2>(d_values);
    await_product<1>(d_keys);
    start_probability_gradients(d_scores, warpgroup, shared, barriers, next, ended);
    if (!ended) {
      release(barriers.outputs_empty(use));
      release(barriers.queries_empty(use));
    }
    await_product<1>(scores);
    mbarrier_wait(barriers.scores_full(use), barriers.score_phase(use));
  }
  await_product<0>(d_scores);
  release(barriers.outputs_empty(use - 1));
  release(barriers.queries_empty(use - 1));
  start_query_gradients(d_queries, warpgroup, scores_at(shared, use - 1), shared);
  await_product<0>(d_queries);
  hand_over_gradients(d_queries, warpgroup, barriers, use - 1, handed);
}

// What a warpgroup does for a work: dK and dV of its keys.
__device__ __forceinline__ void differentiate(const WorkTile& work, int& use, int warpgroup, unsigned shared,
                                              const Barriers& barriers, const BackwardDkdvArguments& arguments) {
  float d_keys[kHeadDimPadded / 2] = {}, d_values[kValueDimPadded / 2] = {};
  Walk walk(work, arguments);
  const bool any = !walk.ended(arguments);
  if (any) walk_queries(d_keys, d_values, work, walk, use, warpgroup, shared, barriers, arguments);
  release(barriers.keys_empty());
  write_gradients(d_keys, d_values, work, use, any, warpgroup, shared, barriers, arguments);
}

// The same in a warp, as the compiler can see.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// What a warpgroup that computes does: one work after the other.
__device__ __forceinline__ void differentiate_works(unsigned shared, const Barriers& barriers,
                                                    const BackwardDkdvArguments& arguments) {
  for (int turn = 0, use = 0;; ++turn) {
    mbarrier_wait(barriers.work_tile_full(turn), turn / 2 & 1);
    const WorkTile& work = work_tile_slot(turn);   // which stays there: what is read anew needs no registers
    if (uniform(work.first_key) < 0) break;
    // Both anew with each work, else registers hold all along what follows from them.
    const int warpgroup = uniform(threadIdx.x / 128);
    use = uniform(use);
    differentiate(work, use, warpgroup, shared, barriers, arguments);
    __syncwarp();   // no lane reads it any more
    release(barriers.work_tile_empty(turn));
  }
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();   // shared memory goes with the block
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_dkdv_bf16_d128_causal_56b1805a(const __grid_constant__ BackwardDkdvArguments arguments) {
  const unsigned shared = shared_address(shared_memory);
  const Barriers barriers = {shared + kBarrierOffset};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();

  if (uniform(threadIdx.x / 128) == kConsumers) {
    registers_decrease<40>();
    const int warp = uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      if (elect_one()) load_works(shared, barriers, arguments);
    } else if (warp <= kAdders) {
      if (elect_one()) add_up_works(shared, barriers, arguments);
    } else {
      finish(arguments);
    }
  } else {
    registers_increase<232>();
    differentiate_works(shared, barriers, arguments);
    finish(arguments);
  }
}
