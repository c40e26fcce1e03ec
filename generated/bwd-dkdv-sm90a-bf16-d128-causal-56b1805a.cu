// flashgen: attention backward, dkdv, bf16-d128-causal-56b1805a
// Computes dK and dV, and dQ; a CTA iterates over the queries of a key tile.
//
// mask     causal()
// score    none; scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32
// target   sm_90a, family hopper
// plan     64 queries x 128 keys, 2 consumer warpgroups of 232 registers, the next S overlaps dK and dV, 3 stages of Q and dO, 231144 bytes of shared memory
// FLOPs    1280 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      1800 * batch * heads_q * len_q + 1024 * batch * heads_kv * len_k bytes, at least
//
// Grid: persistent, one CTA per multiprocessor; work tiles are (key tile, KV head, batch). Reproduce with
//   flashgen show --pass backward --kernel dkdv --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":null,"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct Strides {   // in elements
  long long batch, head, row;
};

struct alignas(64) TensorMap {   // a CUtensorMap, which describes an array to TMA
  unsigned long long words[16];
};

struct BackwardDkdvArguments {
  TensorMap q_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap k_map;   // axes: column, row, head, batch; box: 64 columns x 128 rows
  TensorMap v_map;   // axes: column, row, head, batch; box: 64 columns x 128 rows
  TensorMap d_o_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap dk_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  TensorMap dv_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  float* dq_accum;   // (batch, heads_q, rows, padded head_dim), in fragment order
  // (batch, heads_q, rows / tile): 0 until a CTA adds to the dQ tile; accumulate_dq explains the states
  unsigned* dq_tile_state;
  unsigned* dq_added;   // (batch, heads): work tiles whose dQ has been added; 0 before a launch
  unsigned* dq_next;   // (1): the next group of dQ rows to convert; 0 before a launch
  Element* dq;   // (batch, heads_q, len_q, head_dim)
  unsigned* next_tile;   // counts fetched work tiles: 0 before and after a launch
  Strides dq_strides;
  int tiles;   // work tiles of all heads and batch entries
  int tiles_k;   // key tiles of a head
  int heads;   // KV heads of a batch entry
  int heads_at_once;   // heads whose work tiles fill all multiprocessors
  int batch;
  int heads_q;
  int heads_per_kv;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDimPadded = 128;   // a multiple of the depth of a wgmma; zeros beyond head_dim
constexpr int kValueDimPadded = 128;
constexpr int kConsumers = 2;   // consumer warpgroups, beside the producer warpgroup
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPartK = 64;   // keys of a warpgroup. It holds S and P transposed: a row is a key, a column a query
constexpr int kTileK = kConsumers * kPartK;   // keys of a work tile
constexpr int kTileQ = 64;   // queries of an iteration
constexpr int kStages = 3;   // of the pipelines of Q and dO in shared memory
constexpr int kDsStages = 2;   // of dS in shared memory: one is written while dQ is computed from the other
constexpr float kScale = 0.0883883461f;
constexpr float kScoreToLog2 = 0.127517432f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
constexpr float kNoLse = 3.40282347e+38f;     // marks a row whose scores are all masked
constexpr float kLargeLse = 4096.0f;     // to the base 2; the rounding of larger ones is visible in P
constexpr float kLseRounding = 2.38418579e-07f;   // 2^-22: relative error of LSEs and of scores in log2

// The masking that the scores of a tile need.
//   kNone: none, since all scores are allowed.
//   kMask: the mask.
//   kMaskAndBounds: the mask, the bounds, and the clamp of exponents that large LSEs need. It is chosen if the tile
//     extends beyond a bound or an LSE is large.
//     The only bound is the end of the keys.
enum class Masking { kNone, kMask, kMaskAndBounds };

// Each warpgroup computes a part of a tile of dQ: 64 rows, and if the tile has fewer such parts than there are
// warpgroups, a group of the columns of these rows.
constexpr int kDqRowParts = kTileQ / 64;
constexpr int kDqColumnParts = kConsumers / kDqRowParts;
constexpr int kDqColumns = kHeadDimPadded / kDqColumnParts;
constexpr int kDqWarpBytes = 16 * kDqColumns * sizeof(float);   // of dQ that one warp stores: 16 rows of kDqColumns floats
constexpr int kDqWriters = 1;   // dQ writers: one thread each of as many warps, which add dQ to the accumulator
constexpr int kConvertedRows = 16;   // rows of dQ that a warp converts at a time: few, so that all warps get some at the end

// A tile consists of panels of columns, one after the other. A panel is as wide as the TMA swizzle.
constexpr int kHeadPanel = 64;    // columns of Q, K and dK
constexpr int kValuePanel = 64;   // columns of dO, V and dV
constexpr int kElementBytes = sizeof(Element);
static_assert(kDqColumns % kHeadPanel == 0, "a part of dQ has whole panels of K");

// Shared memory of a CTA, 231144 bytes, by offset:
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
constexpr int kDoBytes = kTileQ * kValueDimPadded * kElementBytes;
constexpr int kDsBytes = kTileQ * kTileK * kElementBytes;
constexpr int kDqBytes = kTileQ * kHeadDimPadded * sizeof(float);
constexpr int kLseAndDBytes = kTileQ * sizeof(float2);
constexpr int kBarrierBytes = (4 * kStages + 2 * kDsStages + 1 + 2 + 2 + 2 * 2) * 8;
constexpr int kWorkTileBytes = 16;
constexpr int kValueOffset = kKeyBytes;
constexpr int kQueryOffset = kValueOffset + kValueBytes;
constexpr int kDoOffset = kQueryOffset + kStages * kQueryBytes;
constexpr int kDsOffset = kDoOffset + kStages * kDoBytes;
constexpr int kDqOffset = kDsOffset + kDsStages * kDsBytes;
constexpr int kLseAndDOffset = kDqOffset + kDqBytes;
constexpr int kBarrierOffset = kLseAndDOffset + kStages * kLseAndDBytes;
constexpr int kWorkTileOffset = kBarrierOffset + kBarrierBytes;
constexpr int kDkOffset = kDqOffset;
constexpr int kDvOffset = kValueOffset;
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

// Waits for this thread's bulk stores and reductions to complete, and adds to a counter. The results are visible to a
// thread that acquires the counter.
__device__ __forceinline__ void counter_add(unsigned* counter, unsigned amount) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(amount) : "memory");
}

// Waits until a counter is at least `target`. Bulk stores and reductions that precede its increments are
// then visible to this thread.
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

// Arrives at the barrier's current phase, and adds `bytes` to the bytes of copies that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(unsigned barrier, unsigned bytes) {
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
// CUTLASS calls this warpgroup_fence_operand.
template <int kCount>
__device__ __forceinline__ void order_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i]) :: "memory");
}

// Rounds two floats to nearest even and puts them into one register, `low` in the lower half.
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

// Waits for this thread's bulk stores and reductions to complete, and advances a semaphore from `value` to value + 1.
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
// mma.m16n8k16. b is the descriptor of a shared-memory tile, MN-major if kTransposedB, otherwise K-major. d is valid
// after the group of the wgmma is complete.
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
// shared-memory tiles. b is MN-major if kTransposedB, otherwise K-major. d is valid after the group of the wgmma is
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
// between its panels (leading, unused for a K-major tile) and between its groups of 8 rows (stride), and the
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

// A position in a pipeline, whose iterations use its stages in shared memory in turn. CUTLASS's class of this name
// holds a stage and a phase. This one counts iterations, so that one register serves pipelines with different numbers
// of stages.
template <int kNumStages>
struct PipelineState {
  int iteration;

  __device__ __forceinline__ int stage() const { return iteration % kNumStages; }

  // The parity of the phase of the stage's full barrier that the consumer waits for. The producer waits for the other
  // parity of the empty barrier, that of the previous phase.
  __device__ __forceinline__ unsigned phase() const { return iteration / kNumStages & 1; }

  __device__ __forceinline__ PipelineState operator+(int count) const { return {iteration + count}; }
  __device__ __forceinline__ PipelineState& operator++() { return ++iteration, *this; }
  __device__ __forceinline__ PipelineState operator++(int) { return {iteration++}; }
};

// The shared memory of a CTA. Its members return addresses of buffers and mbarriers: addresses of 32 bits in the shared
// window, as TMA, wgmma and mbarriers take them. Pointers to arrays of a C++ struct would have 64 bits, and take more
// instructions.
struct SharedStorage {
  unsigned base, barriers;   // the addresses of the buffers, and of the mbarriers

  __device__ __forceinline__ unsigned keys() const { return base; }
  __device__ __forceinline__ unsigned values() const { return base + kValueOffset; }
  __device__ __forceinline__ unsigned queries(int stage) const { return base + (kQueryOffset + stage * kQueryBytes); }
  __device__ __forceinline__ unsigned d_o(int stage) const { return base + (kDoOffset + stage * kDoBytes); }
  __device__ __forceinline__ unsigned ds(int stage) const { return base + (kDsOffset + stage * kDsBytes); }
  __device__ __forceinline__ unsigned dq() const { return base + kDqOffset; }
  __device__ __forceinline__ unsigned lse_and_d(int stage) const { return base + (kLseAndDOffset + stage * kLseAndDBytes); }
  __device__ __forceinline__ unsigned dk() const { return base + kDkOffset; }
  __device__ __forceinline__ unsigned dv() const { return base + kDvOffset; }

  // queries_full: a tile of Q, LSE and D have landed, and K if it is the first of a work tile. d_o_full: a tile of dO
  // has landed, and V if it is the first of a work tile. queries_empty, d_o_empty: every consumer warp has read Q, or
  // dO.
  __device__ __forceinline__ unsigned queries_full(int stage) const { return barriers + stage * 32; }
  __device__ __forceinline__ unsigned queries_empty(int stage) const { return barriers + 8 + stage * 32; }
  __device__ __forceinline__ unsigned d_o_full(int stage) const { return barriers + 16 + stage * 32; }
  __device__ __forceinline__ unsigned d_o_empty(int stage) const { return barriers + 24 + stage * 32; }

  // ds_full: every consumer warp has written its part of dS. ds_empty: every consumer warp has read dS.
  __device__ __forceinline__ unsigned ds_full(int stage) const { return barriers + kStages * 32 + stage * 16; }
  __device__ __forceinline__ unsigned ds_empty(int stage) const { return barriers + kStages * 32 + 8 + stage * 16; }

  // dq_empty: the dQ writer has read a tile of dQ. There is one phase for each iteration.
  __device__ __forceinline__ unsigned dq_empty() const { return barriers + kStages * 32 + kDsStages * 16; }

  // dq_full(parity): every consumer warp has written its part of dQ of an iteration with this parity. Both barriers
  // guard the same buffer.
  __device__ __forceinline__ unsigned dq_full(int stage) const { return barriers + kStages * 32 + kDsStages * 16 + 8 + stage * 8; }

  // keys_empty, values_empty: every consumer warp has read K, or V. There is one phase for each work tile.
  __device__ __forceinline__ unsigned keys_empty() const { return barriers + kStages * 32 + kDsStages * 16 + 24; }
  __device__ __forceinline__ unsigned values_empty() const { return barriers + kStages * 32 + kDsStages * 16 + 32; }

  // work_tile_full: the producer has published a work tile. work_tile_empty: all its readers are done with it.
  __device__ __forceinline__ unsigned work_tile_full(int stage) const { return barriers + kStages * 32 + kDsStages * 16 + 40 + stage * 16; }
  __device__ __forceinline__ unsigned work_tile_empty(int stage) const { return barriers + kStages * 32 + kDsStages * 16 + 48 + stage * 16; }

  // Returns a pointer to what is at an address, for reads and writes by threads.
  template <typename T>
  __device__ __forceinline__ T* pointer(unsigned address) const {
    return reinterpret_cast<T*>(shared_memory + static_cast<int>(address - base));
  }

  // Initialises all mbarriers. One thread must call this. Other threads may use the mbarriers after a __syncthreads.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(queries_full(stage), 1);
      mbarrier_init(queries_empty(stage), kConsumers * 4);
      mbarrier_init(d_o_full(stage), 1);
      mbarrier_init(d_o_empty(stage), kConsumers * 4);
    }
    for (int stage = 0; stage < kDsStages; ++stage) {
      mbarrier_init(ds_full(stage), kConsumers * 4);
      mbarrier_init(ds_empty(stage), kConsumers * 4);
    }
    mbarrier_init(dq_empty(), 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(dq_full(stage), kConsumers * 4);
    }
    mbarrier_init(keys_empty(), kConsumers * 4);
    mbarrier_init(values_empty(), kConsumers * 4);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(work_tile_full(stage), 1);
      mbarrier_init(work_tile_empty(stage), kConsumers * 4 + kDqWriters);
    }
    mbarrier_fence_init();
  }
};

// Lane 0 arrives at a barrier for its warp. Precondition: all lanes have finished their accesses, which a warp-wide
// instruction ensures, such as __syncwarp or the wait for a wgmma.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Starts copying kRows rows from first_row on, panel by panel. They complete on `barrier`, which must expect them.
template <int kRows, int kColumns, int kPanel>
__device__ __forceinline__ void load_rows(unsigned tile, const TensorMap& map, unsigned barrier, int first_row, int head,
                                          int batch) {
#pragma unroll 1   // the producer has few registers
  for (int column = 0; column < kColumns; column += kPanel)
    tma_load_4d(tile + column * kRows * kElementBytes, map, barrier, column, first_row, head, batch);
}

// Multiplies a warp's 16 rows by a factor, rounds them and stores them. They go through shared memory, where they are
// the first of the kPanelRows rows of each panel of columns, in the layout that TMA swizzles. TMA clips rows beyond the
// last one.
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

// Issues the wgmmas of product = A * B^T for 64 rows of A and kRowsB rows of B, both in shared memory (SS). Both tiles
// are K-major: their columns are the reduction dimension. A panel of A has kRowsA rows.
template <int kDepth, int kPanel, int kRowsA, int kRowsB>
__device__ __forceinline__ void issue_wgmma_ss(float (&product)[kRowsB / 2], unsigned a_tile, unsigned b_tile) {
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

// Issues the wgmmas of product += A * B with the fragments of A in registers and B in shared memory (RS). B is
// MN-major: its kDepth rows are the reduction dimension.
template <int kColumns, int kPanel, int kDepth>
__device__ __forceinline__ void issue_wgmma_rs(float (&product)[kColumns / 2], const unsigned (&a)[kDepth / 16][4],
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

// Waits until the product is computed, while at most kPending groups of wgmmas that started later still run.
template <int kPending, int kCount>
__device__ __forceinline__ void await_product(float (&product)[kCount]) {
  wgmma_wait<kPending>();
  order_registers(product);
}

// Stores a warp's 16 rows in the order of the fragments: the 32 lanes store 16 bytes each for every 8 columns.
template <int kColumns>
__device__ __forceinline__ void store_fragments(const float (&rows)[kColumns / 2], void* destination) {
  unsigned char* const lane = static_cast<unsigned char*>(destination) + threadIdx.x % 32 * 16;
#pragma unroll
  for (int n = 0; n < kColumns / 2; n += 4) {
    *reinterpret_cast<float4*>(lane + n * 128) = make_float4(rows[n], rows[n + 1], rows[n + 2], rows[n + 3]);
  }
}

// The coordinates of a lane's fragment of a wgmma accumulator with kColumns columns; the fragment itself is an array of
// kElements floats. Of each group of 8 columns it has four elements, two adjacent columns in each of two rows that are
// 8 apart (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"). Its first element is in row lane / 4 of the
// warp's 16 rows and in column lane % 4 * 2. Coordinates are relative to that element.
template <int kColumns>
struct Fragment {
  static constexpr int kRows = 2;                // rows that have elements
  static constexpr int kPairs = kColumns / 8;    // pairs of adjacent elements in each of these rows
  static constexpr int kElements = kRows * kPairs * 2;

  // Element n is in the fragment's row row_index(n), of 0 <= r < kRows. Its coordinates are row(n) and column(n).
  static __device__ constexpr int row_index(int n) { return n / 2 % 2; }
  static __device__ constexpr int row(int n) { return row_offset(row_index(n)); }
  static __device__ constexpr int column(int n) { return n / 4 * 8 + n % 2; }

  // row_offset is the coordinate of the fragment's row r, and pair is the index of the first of the two elements of
  // pair j of that row.
  static __device__ constexpr int row_offset(int r) { return r * 8; }
  static __device__ constexpr int pair(int r, int j) { return j * 4 + r * 2; }
};

using Scores = Fragment<kTileQ>;

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `key` is a position in
// the sequence. `query` is relative to the query tile, since the mainloop iterates over query tiles.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const BackwardDkdvArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: kTileK keys of one KV head of one batch, for all query heads that share the KV head.
struct WorkTile { int first_key, head_kv, batch; };

static_assert(sizeof(WorkTile) <= kWorkTileBytes, "shared memory holds a work tile");

// Returns the work tile of an index. Heads follow each other, each with all its key tiles. The work tiles of the last
// `heads_at_once` heads are ordered by key tile first: with most masks later key tiles have fewer queries, so that the
// launch ends with short work tiles.
__device__ __forceinline__ WorkTile work_tile_at(unsigned index, const BackwardDkdvArguments& arguments) {
  const int heads = arguments.tiles / arguments.tiles_k, last_heads = min(arguments.heads_at_once, heads);
  const int rest = index - (heads - last_heads) * arguments.tiles_k;   // position among the tiles of the last heads
  const int tile = rest < 0 ? index % arguments.tiles_k : rest / last_heads;
  const int head = rest < 0 ? index / arguments.tiles_k : heads - last_heads + rest % last_heads;
  return {tile * kTileK, head % arguments.heads, head / arguments.heads};
}

// Returns the slot in shared memory in which the producer publishes the work tiles of the CTA. There are two slots. A
// negative first_key tells the other warps that no work tile is left.
__device__ __forceinline__ WorkTile& work_tile_slot(int stage) {
  return reinterpret_cast<WorkTile*>(shared_memory + kWorkTileOffset)[stage];
}

// The query tiles to visit for a key tile. The mainloop takes an iteration for each. Those from full_begin to full_end
// need no mask. begin, full_begin and full_end are indices of tiles; count is a number of tiles.
struct QueryTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_query(int step) const { return (begin + step) * kTileQ; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

// Returns the query tiles of a work tile and a query head.
__device__ __forceinline__ QueryTiles query_tiles_of(const WorkTile& work, int head, const BackwardDkdvArguments& arguments) {
  const int k_first = work.first_key;
  const int k_last = min(work.first_key + kTileK, arguments.len_k) - 1;
  // The bounds are half-open ranges of queries.
  const int first_query = max(0, k_first + arguments.len_q - arguments.len_k);
  const int end_query = arguments.len_q;
  const int full_first_query = max(0, k_last + arguments.len_q - arguments.len_k);
  const int full_end_query = arguments.len_q;
  const int first_tile = first_query / kTileQ;
  const int count = end_query > first_query ? (end_query + kTileQ - 1) / kTileQ - first_tile : 0;
  return {first_tile, count, (full_first_query + kTileQ - 1) / kTileQ, full_end_query / kTileQ};
}

// Iterates over the query tiles that attend to the keys of a work tile, for one query head after the other. Each query
// tile is one iteration of the mainloop.
struct QueryIterator {
  QueryTiles tiles;       // of the current head
  int group_head, step;   // index of the head among those of the work tile, and of the query tile in `tiles`

  __device__ __forceinline__ QueryIterator(const WorkTile& work, const BackwardDkdvArguments& arguments)
      : tiles(query_tiles_of(work, work.head_kv * arguments.heads_per_kv, arguments)), group_head(0), step(0) {
    skip_empty_heads(work, arguments);
  }

  __device__ __forceinline__ bool done(const BackwardDkdvArguments& arguments) const {
    return group_head == arguments.heads_per_kv;
  }
  __device__ __forceinline__ int head(const WorkTile& work, const BackwardDkdvArguments& arguments) const {
    return work.head_kv * arguments.heads_per_kv + group_head;
  }
  __device__ __forceinline__ int first_query() const { return tiles.first_query(step); }

  __device__ __forceinline__ void advance(const WorkTile& work, const BackwardDkdvArguments& arguments) {
    ++step;
    skip_empty_heads(work, arguments);
  }

  // If the current head has no iterations left, moves to the next head that has some.
  __device__ __forceinline__ void skip_empty_heads(const WorkTile& work, const BackwardDkdvArguments& arguments) {
    while (step >= tiles.count && ++group_head < arguments.heads_per_kv) {
      tiles = query_tiles_of(work, head(work, arguments), arguments);
      step = 0;
    }
  }
};

// Returns the row of the workspaces at which the iterator's query tile begins.
__device__ __forceinline__ long long workspace_row(const QueryIterator& iterator, const WorkTile& work,
                                                   const BackwardDkdvArguments& arguments) {
  const long long head = static_cast<long long>(work.batch) * arguments.heads_q + iterator.head(work, arguments);
  return head * arguments.rows + iterator.first_query();
}

// ---- The producer ---------------------------------------------------------------------------------------------------

// Loads a work tile: Q, LSE, D and dO of each iteration, and with the first iteration K and V, once the buffers
// of the previous work tile are released.
__device__ __forceinline__ void load_work_tile(const WorkTile& work, QueryIterator& iterator, PipelineState<1> kv_state,
                                               PipelineState<kStages>& state, const SharedStorage& storage,
                                               const BackwardDkdvArguments& arguments) {
  for (bool first = true; !iterator.done(arguments); iterator.advance(work, arguments), ++state, first = false) {
    const int head = iterator.head(work, arguments);
    mbarrier_wait(storage.queries_empty(state.stage()), state.phase() ^ 1);
    mbarrier_arrive_expect_bytes(storage.queries_full(state.stage()), kQueryBytes + kLseAndDBytes + (first ? kKeyBytes : 0));
    load_rows<kTileQ, kHeadDimPadded, kHeadPanel>(storage.queries(state.stage()), arguments.q_map,
                                                  storage.queries_full(state.stage()), iterator.first_query(), head, work.batch);
    bulk_load(storage.lse_and_d(state.stage()), arguments.lse_and_d + workspace_row(iterator, work, arguments) * 2,
              kLseAndDBytes, storage.queries_full(state.stage()));
    if (first) {
      mbarrier_wait(storage.keys_empty(), kv_state.phase() ^ 1);
      load_rows<kTileK, kHeadDimPadded, kHeadPanel>(storage.keys(), arguments.k_map, storage.queries_full(state.stage()),
                                                    work.first_key, work.head_kv, work.batch);
    }
    mbarrier_wait(storage.d_o_empty(state.stage()), state.phase() ^ 1);
    mbarrier_arrive_expect_bytes(storage.d_o_full(state.stage()), kDoBytes + (first ? kValueBytes : 0));
    load_rows<kTileQ, kValueDimPadded, kValuePanel>(storage.d_o(state.stage()), arguments.d_o_map,
          storage.d_o_full(state.stage()), iterator.first_query(), head, work.batch);
    if (first) {
      mbarrier_wait(storage.values_empty(), kv_state.phase() ^ 1);
      load_rows<kTileK, kValueDimPadded, kValuePanel>(storage.values(), arguments.v_map,
            storage.d_o_full(state.stage()), work.first_key, work.head_kv, work.batch);
    }
  }
}

// The producer: takes work tiles until none is left, publishes each of them to the other warps, and loads it.
__device__ __forceinline__ void producer(const SharedStorage& storage, const BackwardDkdvArguments& arguments) {
  PipelineState<kStages> state = {0};   // of Q and dO, through all work tiles
  for (PipelineState<2> tile_state = {0};; ++tile_state) {
    const PipelineState<1> kv_state = {tile_state.iteration};   // K and V have one stage
    // Fetches the next index that no other CTA has taken. Each CTA fetches one that is too large, and the last such
    // increment wraps the counter to 0, as it began.
    const unsigned index = atomicInc(arguments.next_tile, arguments.tiles + gridDim.x - 1);
    mbarrier_wait(storage.work_tile_empty(tile_state.stage()), tile_state.phase() ^ 1);
    WorkTile& work = work_tile_slot(tile_state.stage());
    if (index >= arguments.tiles) {
      work.first_key = -1;
      mbarrier_arrive(storage.work_tile_full(tile_state.stage()));
      return;
    }
    work = work_tile_at(index, arguments);
    QueryIterator iterator(work, arguments);
    if (iterator.done(arguments)) {
      // Consumers wait for no load of a work tile without iterations. Such a work tile is published only after they
      // have released K and V of the previous one. keys_empty and values_empty could otherwise complete two phases
      // between two waits of the producer, whose parity test cannot tell two phases from none.
      mbarrier_wait(storage.keys_empty(), kv_state.phase() ^ 1);
      mbarrier_wait(storage.values_empty(), kv_state.phase() ^ 1);
    }
    mbarrier_arrive(storage.work_tile_full(tile_state.stage()));
    load_work_tile(work, iterator, kv_state, state, storage, arguments);
  }
}

// ---- The dQ accumulator ---------------------------------------------------------------------------------------------

// Returns the index of a warp's part of a tile of dQ, in the accumulator and in shared memory.
__device__ __forceinline__ int warp_part_of_dq(int warpgroup) {
  const int row_part = warpgroup / kDqColumnParts, column_part = warpgroup % kDqColumnParts;
  return (row_part * 4 + threadIdx.x / 32 % 4) * kDqColumnParts + column_part;
}

// Releases dS of an iteration, and stores this warp's part of dQ to shared memory for the dQ writer, once the writer
// has read dQ of the previous iteration. In the first iteration of a work tile `has_stored` is false, and nothing is
// waited for: the epilogue of the previous work tile has waited.
__device__ __forceinline__ void store_dq(const float (&dq)[kDqColumns / 2], int warpgroup,
                                         const SharedStorage& storage, PipelineState<kDsStages> state, bool has_stored) {
  release(storage.ds_empty(state.stage()));
  if (has_stored) mbarrier_wait(storage.dq_empty(), PipelineState<1>{state.iteration}.phase() ^ 1);
  store_fragments<kDqColumns>(
      dq, storage.pointer<unsigned char>(storage.dq()) + warp_part_of_dq(warpgroup) * kDqWarpBytes);
  fence_async_shared();
  __syncwarp();
  release(storage.dq_full(state.iteration % 2));
}

// Adds the dQ of a work tile to the accumulator. The first CTA that reaches a tile of dQ stores instead, so that only
// the tile states need zeroing: a state is 0 before that store, 1 during it and 2 after it. Others add in any order.
__device__ __forceinline__ void accumulate_dq(const WorkTile& work, PipelineState<2>& state,
                                              const SharedStorage& storage, const BackwardDkdvArguments& arguments) {
  for (QueryIterator iterator(work, arguments); !iterator.done(arguments); iterator.advance(work, arguments), ++state) {
    const long long row = workspace_row(iterator, work, arguments);
    unsigned* const tile_state = arguments.dq_tile_state + row / kTileQ;
    float* const accumulator = arguments.dq_accum + row * kHeadDimPadded;
    const bool is_stored = semaphore_test(tile_state, 2);   // true most of the time
    mbarrier_wait(storage.dq_full(state.stage()), state.phase());
    const bool is_first = !is_stored && atomicCAS(tile_state, 0u, 1u) == 0;
    if (!is_stored && !is_first) semaphore_wait(tile_state, 2);
    if (is_first) bulk_store(accumulator, storage.dq(), kDqBytes);
    else bulk_reduce_add(accumulator, storage.dq(), kDqBytes);
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(storage.dq_empty());
    if (is_first) semaphore_release(tile_state, 1);   // from 1 to 2
  }
}

// A dQ writer: one thread that adds the dQ of each work tile to the accumulator, and then adds 1 to dq_added of the
// head. The warps that convert dQ of the head wait for this count.
__device__ __forceinline__ void dq_writer(const SharedStorage& storage,
                                          const BackwardDkdvArguments& arguments) {
  PipelineState<2> dq_state = {0};   // of dQ's full barriers
  for (PipelineState<2> tile_state = {0};; ++tile_state) {
    mbarrier_wait(storage.work_tile_full(tile_state.stage()), tile_state.phase());
    const WorkTile& work = work_tile_slot(tile_state.stage());   // stays in shared memory, as registers are few
    if (work.first_key < 0) return;
    accumulate_dq(work, dq_state, storage, arguments);
    counter_add(arguments.dq_added + work.batch * arguments.heads + work.head_kv, 1);
    mbarrier_arrive(storage.work_tile_empty(tile_state.stage()));
  }
}

// Converts kConvertedRows rows of the dQ accumulator with one warp. `row_group` is the index of such a group of rows,
// over all query heads of all batches, each of which has groups_per_head groups. Four lanes convert two rows, 8 apart.
// A row that attends to no key is 0, whatever K holds, and so is a tile of dQ to which no CTA has added.
__device__ __forceinline__ void convert_dq_rows(unsigned row_group, const BackwardDkdvArguments& arguments) {
  const unsigned groups_per_head = arguments.rows / kConvertedRows, batch_head = row_group / groups_per_head;
  const long long first_row = static_cast<long long>(row_group) * kConvertedRows;
  const int batch = batch_head / arguments.heads_q, head = batch_head % arguments.heads_q;
  const int lane = threadIdx.x % 32, query = row_group % groups_per_head * kConvertedRows + lane / 4;
  const bool is_added = __ldcg(arguments.dq_tile_state + first_row / kTileQ) > 0;
  const float* const lse_and_d = arguments.lse_and_d + (first_row + lane / 4) * 2;
  const bool attends[2] = {(lse_and_d[0] != kNoLse) && is_added, (lse_and_d[16] != kNoLse) && is_added};
  const float* const accumulator = arguments.dq_accum + first_row * kHeadDimPadded + lane * 4;
  Element* const gradient = arguments.dq + batch * arguments.dq_strides.batch + head * arguments.dq_strides.head +
                            query * arguments.dq_strides.row + lane % 4 * 8;
#pragma unroll 1
  for (int column = 0; column < kHeadDimPadded; column += 32) {
    unsigned rows[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // a lane has two of each 8 columns, in both rows
      const float4 four = __ldcg(reinterpret_cast<const float4*>(accumulator + column * 16 + i * 128));
      rows[0][i] = attends[0] ? pack_bf16(four.x * kScale, four.y * kScale) : 0;
      rows[1][i] = attends[1] ? pack_bf16(four.z * kScale, four.w * kScale) : 0;
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

// Converts the dQ accumulator of each head once all work tiles of the head have been added. Each warp takes the next
// rows that no other warp has taken. There is no deadlock: every work tile is taken by a resident CTA, which adds its
// dQ without waiting for this function.
__device__ __forceinline__ void convert_dq(const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32;
  const unsigned groups_per_kv_head = arguments.heads_per_kv * arguments.rows / kConvertedRows;
  const unsigned row_groups = arguments.batch * arguments.heads * groups_per_kv_head;
  unsigned next = lane == 0 ? atomicAdd(arguments.dq_next, 1u) : 0, complete_heads = 0;   // heads waited for
  for (;;) {
    const unsigned row_group = __shfl_sync(0xffffffffu, next, 0);
    if (row_group >= row_groups) return;
    const unsigned head = row_group / groups_per_kv_head;
    if (lane == 0) next = atomicAdd(arguments.dq_next, 1u);   // returns during the conversion
    if (head >= complete_heads) {
      if (lane == 0) counter_wait(arguments.dq_added + head, arguments.tiles_k * kDqWriters);
      __syncwarp();
      complete_heads = head + 1;
    }
    convert_dq_rows(row_group, arguments);
  }
}

// ---- The consumers --------------------------------------------------------------------------------------------------

// Returns LSE and D of the two adjacent queries of this lane's pair j: (LSE, D) of the first, then of the second. A
// column of the transposed scores is a query, so that pair j has the same queries in both rows of the lane. lse_and_d:
// the tile's (kTileQ, 2) floats in shared memory.
__device__ __forceinline__ float4 lse_and_d_of(const unsigned char* lse_and_d, int j) {
  return *reinterpret_cast<const float4*>(lse_and_d + (Scores::column(Scores::pair(0, j)) + threadIdx.x % 4 * 2) * 8);
}

// Returns whether some query of a tile has a large LSE.
__device__ __forceinline__ bool has_large_lse(const unsigned char* lse_and_d) {
  float largest = 0.0f;
  for (int row = threadIdx.x % 32; row < kTileQ; row += 32) {
    const float lse = fabsf(*reinterpret_cast<const float*>(lse_and_d + row * 8));
    if (lse < kNoLse) largest = fmaxf(largest, lse);
  }
  return __any_sync(0xffffffffu, largest > kLargeLse);
}

// Recomputes P in place of the products Q * K^T. P of masked-out scores is 0. With kMaskAndBounds, an exponent above
// -|LSE| * kLseRounding counts as 0: P is then at most 1, and exactly 1 if it differs from 1 by no more than the
// rounding of the LSE. Without it, rounding may put P slightly above 1.
template <Masking kMasking>
__device__ __forceinline__ void recompute_p(float (&scores)[Scores::kElements],
                                            const unsigned char* lse_and_d, const Position& position,
                                            int first_query, const BackwardDkdvArguments& arguments) {
#pragma unroll
  for (int j = 0; j < Scores::kPairs; ++j) {
    const float4 statistics = lse_and_d_of(lse_and_d, j);
#pragma unroll
    for (int m = 0; m < Scores::kRows * 2; ++m) {
      const int n = Scores::pair(m / 2, j) + m % 2;
      const int q = first_query + position.query + Scores::column(n), k = position.key + Scores::row(n);
      const float lse = m % 2 ? statistics.z : statistics.x;
      float exponent = fmaf(scores[n], kScoreToLog2, -lse);
      if (kMasking == Masking::kMaskAndBounds && exponent > fabsf(lse) * -kLseRounding) exponent = 0.0f;
      const float probability = exp2_approx(exponent);
      const bool allowed = kMasking == Masking::kNone ||
          (kMasking == Masking::kMask || k < arguments.len_k) & mask_mod(q, k, arguments);
      scores[n] = allowed ? probability : 0.0f;
    }
  }
}

// Turns dP into dS = P * (dP - D) with D from the preprocess kernel.
__device__ __forceinline__ void compute_ds(float (&ds)[Scores::kElements],
                                           const float (&probabilities)[Scores::kElements],
                                           const unsigned char* lse_and_d) {
#pragma unroll
  for (int j = 0; j < Scores::kPairs; ++j) {
    const float4 statistics = lse_and_d_of(lse_and_d, j);
#pragma unroll
    for (int m = 0; m < Scores::kRows * 2; ++m) {
      const int n = Scores::pair(m / 2, j) + m % 2;
      ds[n] = probabilities[n] * (ds[n] - (m % 2 ? statistics.w : statistics.y));
    }
  }
}

// Rounds P or dS to the fragments of a wgmma's A operand, one for each 16 columns.
__device__ __forceinline__ void pack_scores(unsigned (&fragments)[Scores::kPairs / 2][4],
                                            const float (&scores)[Scores::kElements]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; n += 2) {
    fragments[n / 8][n / 2 % 4] = pack_bf16(scores[n], scores[n + 1]);
  }
}

// Issues the wgmmas of S^T = K * Q^T for the keys of a warpgroup. If `waits`, first waits for the full barrier of the
// stage of Q.
__device__ __forceinline__ void issue_qk_wgmma(float (&scores)[kTileQ / 2], int warpgroup, const SharedStorage& storage,
                                               PipelineState<kStages> state, bool waits) {
  if (waits) mbarrier_wait(storage.queries_full(state.stage()), state.phase());
  // The warpgroup's rows of each panel.
  const unsigned keys = storage.keys() + warpgroup * kPartK * kHeadPanel * kElementBytes;
  issue_wgmma_ss<kHeadDimPadded, kHeadPanel, kTileK, kTileQ>(scores, keys, storage.queries(state.stage()));
}

// Issues the wgmmas of dP^T = V * dO^T for the keys of a warpgroup. If `waits`, first waits for the full barrier of the
// stage of dO.
__device__ __forceinline__ void issue_dp_wgmma(float (&dp)[kTileQ / 2], int warpgroup, const SharedStorage& storage,
                                               PipelineState<kStages> state, bool waits) {
  if (waits) mbarrier_wait(storage.d_o_full(state.stage()), state.phase());
  const unsigned values = storage.values() + warpgroup * kPartK * kValuePanel * kElementBytes;
  issue_wgmma_ss<kValueDimPadded, kValuePanel, kTileK, kTileQ>(dp, values, storage.d_o(state.stage()));
}

// Turns the scores into P while the wgmma of dP runs, and then dP into dS.
__device__ __forceinline__ void compute_p_and_ds(float (&scores)[kTileQ / 2], float (&ds)[kTileQ / 2],
                                                 const QueryIterator& iterator, const SharedStorage& storage,
                                                 PipelineState<kStages> state, const WorkTile& work,
                                                 const Position& position, const BackwardDkdvArguments& arguments) {
  const int first_query = iterator.first_query();
  const unsigned char* lse_and_d = storage.pointer<unsigned char>(storage.lse_and_d(state.stage()));
  if (work.first_key + kTileK > arguments.len_k || has_large_lse(lse_and_d)) {
    recompute_p<Masking::kMaskAndBounds>(scores, lse_and_d, position, first_query, arguments);
  } else if (!iterator.tiles.full(iterator.step)) {
    recompute_p<Masking::kMask>(scores, lse_and_d, position, first_query, arguments);
  } else {
    recompute_p<Masking::kNone>(scores, lse_and_d, position, first_query, arguments);
  }
  await_product<0>(ds);
  compute_ds(ds, scores, lse_and_d);
}

// Writes dS of this warp's 16 keys to its stage in shared memory, as an operand of dQ: a row for each query, and a
// panel of 64 columns for the keys of each warpgroup.
__device__ __forceinline__ void store_ds(const unsigned (&fragments)[kTileQ / 16][4], int warpgroup,
                                         const SharedStorage& storage, PipelineState<kDsStages> state) {
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  const unsigned row = lane / 16 * 8 + lane % 8, panel = storage.ds(state.stage()) + warpgroup * kTileQ * 128;
  const unsigned address = panel + row * 128 + (chunk ^ lane % 8) * 16;   // swizzled
  mbarrier_wait(storage.ds_empty(state.stage()), state.phase() ^ 1);
#pragma unroll
  for (int i = 0; i < kTileQ / 16; ++i) {
    store_matrix_x4_transposed(address + i * 16 * 128, fragments[i][0], fragments[i][1], fragments[i][2], fragments[i][3]);
  }
  fence_async_shared();
  __syncwarp();
  release(storage.ds_full(state.stage()));
}

// Issues the wgmmas of dQ = dS * K for the part of a tile of dQ that a warpgroup computes.
__device__ __forceinline__ void issue_dq_wgmma(float (&dq)[kDqColumns / 2], int warpgroup, unsigned ds, unsigned keys) {
  constexpr int kSwizzle = kHeadPanel * kElementBytes;
  const int row_part = warpgroup / kDqColumnParts, column_part = warpgroup % kDqColumnParts;
  order_registers(dq);
  wgmma_fence();
  const unsigned long long a = matrix_descriptor<128>(ds + row_part * 64 * 128, 16, 8 * 128);
  const unsigned long long b = matrix_descriptor<kSwizzle>(
      keys + column_part * (kDqColumns / kHeadPanel) * kTileK * kSwizzle, kTileK * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kTileK; depth += 16) {
    wgmma_shared_bf16<kDqColumns, true>(
        dq, a + (depth / 64 * kTileQ * 128 + depth % 64 * kElementBytes) / 16, b + depth * kSwizzle / 16, depth > 0);
  }
  wgmma_commit();
}

// The mainloop over the query tiles of a work tile, which has one at least: a warpgroup accumulates dK and dV of its
// keys. It computes its part of an iteration's dQ in the next iteration, when the other warpgroup has written its dS as
// well. The wgmmas of one warpgroup run while the other one computes P and dS.
__device__ __forceinline__ void mainloop(float (&dk)[kHeadDimPadded / 2], float (&dv)[kValueDimPadded / 2],
                                         const WorkTile& work, QueryIterator& iterator, PipelineState<kStages>& state,
                                         int warpgroup, SharedStorage storage, const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32, key = work.first_key + warpgroup * kPartK + threadIdx.x / 32 % 4 * 16 + lane / 4;
  float scores[kTileQ / 2], ds[kTileQ / 2];   // S, which becomes P, and dP, which becomes dS
  float(&dq)[kDqColumns / 2] = scores;   // the scores are no longer needed when dQ starts
  bool has_previous = false, has_stored = false;   // this is not the first iteration; a tile of dQ has been stored
  issue_qk_wgmma(scores, warpgroup, storage, state, true);
  issue_dp_wgmma(ds, warpgroup, storage, state, true);
  await_product<1>(scores);
  // `base` is opaque to the compiler in each iteration. Registers would otherwise hold the addresses of K and V.
  for (bool is_done = false; !is_done; ++state, storage.base = opaque(storage.base)) {
    const PipelineState<kDsStages> ds_state = {state.iteration};
    const Position position = {work.batch, iterator.head(work, arguments), lane % 4 * 2, key};
    compute_p_and_ds(scores, ds, iterator, storage, state, work, position, arguments);
    unsigned p_fragments[kTileQ / 16][4], ds_fragments[kTileQ / 16][4];
    pack_scores(p_fragments, scores);
    pack_scores(ds_fragments, ds);
    store_ds(ds_fragments, warpgroup, storage, ds_state);
    iterator.advance(work, arguments);
    is_done = iterator.done(arguments);

    // wgmmas start in this order: dQ of the previous iteration, dV, dK, and S and dP of the next iteration. Each is a
    // group of its own. dQ waits for nothing: at the end of the previous iteration both warpgroups had written dS.
    const auto issue_dk_and_dv_wgmma = [&] {
      issue_wgmma_rs<kValueDimPadded, kValuePanel, kTileQ>(dv, p_fragments, storage.d_o(state.stage()));
      issue_wgmma_rs<kHeadDimPadded, kHeadPanel, kTileQ>(dk, ds_fragments, storage.queries(state.stage()));
    };
    if (has_previous) {
      const PipelineState<kDsStages> previous_ds = {state.iteration - 1};
      issue_dq_wgmma(dq, warpgroup, storage.ds(previous_ds.stage()), storage.keys());
      issue_dk_and_dv_wgmma();
      await_product<2>(dq);
      store_dq(dq, warpgroup, storage, previous_ds, has_stored);
      has_stored = true;
    } else {
      issue_dk_and_dv_wgmma();
      has_previous = true;
      if (lane == 0) bulk_wait_read<0>();   // the buffer of dQ held dK of the previous work tile, which has been stored
      __syncwarp();
    }
    // The last iteration computes its own S and dP once more, and discards them: if these wgmmas were in a branch, the
    // compiler would serialize all of them.
    const PipelineState<kStages> next = state + (is_done ? 0 : 1);
    issue_qk_wgmma(scores, warpgroup, storage, next, !is_done);
    await_product<2>(dv);
    await_product<1>(dk);
    issue_dp_wgmma(ds, warpgroup, storage, next, !is_done);
    if (!is_done) {   // otherwise the wgmmas that were started again still read these stages
      release(storage.d_o_empty(state.stage()));
      release(storage.queries_empty(state.stage()));
    }
    await_product<1>(scores);
    mbarrier_wait(storage.ds_full(ds_state.stage()), ds_state.phase());
  }
  await_product<0>(ds);
  const PipelineState<kStages> last = {state.iteration - 1};
  release(storage.d_o_empty(last.stage()));
  release(storage.queries_empty(last.stage()));
  const PipelineState<kDsStages> last_ds = {last.iteration};
  issue_dq_wgmma(dq, warpgroup, storage.ds(last_ds.stage()), storage.keys());
  await_product<0>(dq);
  store_dq(dq, warpgroup, storage, last_ds, has_stored);
}

// The epilogue: stores dK and dV. dV overlays V, and dK overlays this warp's part of dQ, because K of the next work
// tile is loaded at the same time. `dq_state` is the state after the last iteration.
__device__ __forceinline__ void epilogue(const float (&dk)[kHeadDimPadded / 2],
                                         const float (&dv)[kValueDimPadded / 2], const WorkTile& work,
                                         PipelineState<1> dq_state, bool has_iterations,
                                         int warpgroup, const SharedStorage& storage, const BackwardDkdvArguments& arguments) {
  const int row = warpgroup * kPartK + threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;
  // Waits until the warpgroup has read its V.
  named_barrier_sync(1 + warpgroup, 128);
  store_rows<kValueDimPadded, kValuePanel, kTileK>(
      dv, 1.0f, storage.dv() + row * kValuePanel * kElementBytes, arguments.dv_map,
      work.first_key + row, work.head_kv, work.batch);
  // Waits for dV, and for dK of the previous work tile if this one has no iterations.
  if (lane == 0) bulk_wait_read<0>();
  release(storage.values_empty());
  // Waits until the writer has read dQ of the last iteration.
  if (has_iterations) mbarrier_wait(storage.dq_empty(), dq_state.phase() ^ 1);
  __syncwarp();
  store_rows<kHeadDimPadded, kHeadPanel, 16>(
      dk, kScale, storage.dk() + warp_part_of_dq(warpgroup) * kDqWarpBytes, arguments.dk_map,
      work.first_key + row, work.head_kv, work.batch);
}

// Computes dK and dV of the keys of a warpgroup in a work tile.
__device__ __forceinline__ void compute_work_tile(const WorkTile& work, PipelineState<kStages>& state, int warpgroup,
                                                  const SharedStorage& storage, const BackwardDkdvArguments& arguments) {
  float dk[kHeadDimPadded / 2] = {}, dv[kValueDimPadded / 2] = {};
  QueryIterator iterator(work, arguments);
  const bool has_iterations = !iterator.done(arguments);
  if (has_iterations) mainloop(dk, dv, work, iterator, state, warpgroup, storage, arguments);
  release(storage.keys_empty());
  epilogue(dk, dv, work, {state.iteration}, has_iterations, warpgroup, storage, arguments);
}

// Returns the value, and shows the compiler that a warp has one: uniform registers then hold it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// A consumer warpgroup: computes dK and dV of 64 keys of each work tile, and a part of dQ.
__device__ __forceinline__ void consumer(const SharedStorage& storage, const BackwardDkdvArguments& arguments) {
  PipelineState<kStages> state = {0};
  for (PipelineState<2> tile_state = {0};; ++tile_state) {
    mbarrier_wait(storage.work_tile_full(tile_state.stage()), tile_state.phase());
    const WorkTile& work = work_tile_slot(tile_state.stage());   // stays in shared memory, as registers are few
    if (uniform(work.first_key) < 0) break;
    // Both are recomputed for each work tile. Registers would otherwise hold values that are derived from them.
    const int warpgroup = uniform(threadIdx.x / 128);
    state.iteration = uniform(state.iteration);
    compute_work_tile(work, state, warpgroup, storage, arguments);
    __syncwarp();   // all lanes have read the work tile
    release(storage.work_tile_empty(tile_state.stage()));
  }
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();   // before the CTA ends and its shared memory is freed
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_dkdv_bf16_d128_causal_56b1805a(const __grid_constant__ BackwardDkdvArguments arguments) {
  const unsigned shared = shared_address(shared_memory);
  const SharedStorage storage = {shared, shared + kBarrierOffset};
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();

  if (uniform(threadIdx.x / 128) == kConsumers) {
    registers_decrease<40>();
    const int warp = uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      if (elect_one()) producer(storage, arguments);
    } else if (warp <= kDqWriters) {
      if (elect_one()) dq_writer(storage, arguments);
    } else {   // the other warps have nothing to load or to add
      convert_dq(arguments);
    }
  } else {
    registers_increase<232>();
    consumer(storage, arguments);
    convert_dq(arguments);   // after the last work tile of this CTA
  }
}
