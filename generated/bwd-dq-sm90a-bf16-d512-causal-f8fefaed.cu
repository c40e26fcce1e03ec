// flashgen: attention backward, dq, bf16-d512-causal-f8fefaed
// Computes dQ; a CTA iterates over the keys of a query tile.
//
// mask     causal()
// score    none; scale 0.0441941738
// dropout  0
// dims     head 512, value 512; bfloat16, accumulated in float32
// target   sm_90a, family hopper
// plan     64 queries x 48 keys of two CTAs, 3 stages of K or V, 225360 bytes of shared memory
// FLOPs    3072 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      3080 * batch * heads_q * len_q + 2048 * batch * heads_kv * len_k bytes, at least
//
// Grid: one CTA per (query tile, query head, batch). Reproduce with
//   flashgen show --pass backward --kernel dq --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":512,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.044194173824159216,"score":null,"value_dim":512,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct alignas(64) TensorMap {   // a CUtensorMap, which describes an array to TMA
  unsigned long long words[16];
};

struct BackwardDqArguments {
  TensorMap q_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap k_map;   // axes: column, row, head, batch; box: 64 columns x 48 rows
  TensorMap v_map;   // axes: column, row, head, batch; box: 64 columns x 48 rows
  TensorMap d_o_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap dq_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  int heads_q;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
  unsigned kv_reciprocal;   // 2^31 / (query heads per KV head), rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDimPadded = 512;   // of Q and K, and of dO and V; zeros beyond head_dim and value_dim
// A warpgroup accumulates one half of the columns of a gradient in two parts: the compiler refuses a wgmma of 256
// columns in a CTA of 512 threads.
constexpr int kColumns = kHeadDimPadded / 2;
constexpr int kFirstColumns = 128, kSecondColumns = kColumns - kFirstColumns;
constexpr int kThreads = 4 * 128;   // a producer warpgroup, one that computes scores, and two that accumulate
constexpr int kTileQ = 64;   // queries of a work tile
constexpr int kTileK = 48;   // keys of an iteration
constexpr int kStages = 3;   // of the pipeline of K, or of V, in shared memory
constexpr int kPassedStages = 2;   // of the pipelines by which the CTAs pass P and dS to each other
constexpr float kScale = 0.0441941731f;
constexpr float kScoreToLog2 = 0.063758716f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
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

// A tile consists of panels of columns, one after the other. A panel is as wide as the TMA swizzle.
constexpr int kPanel = 64;
constexpr int kElementBytes = sizeof(Element);

// Shared memory of a CTA, 225360 bytes, by offset:
//        0  Q or dO, 65536 bytes
//    65536  K or V, 3 x 49152 bytes
//   212992  P or dS, 2 x 6144 bytes; in the order of the fragments
//   225280  mbarriers, 80 bytes
//        0  dQ, 65536 bytes, overlays Q or dO
constexpr int kResidentBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kStreamedBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kPassedBytes = kTileQ * kTileK * kElementBytes;
constexpr int kBarrierBytes = (2 * kStages + 2 * kPassedStages) * 8;
constexpr int kStreamedOffset = kResidentBytes;
constexpr int kPassedOffset = kStreamedOffset + kStages * kStreamedBytes;
constexpr int kBarrierOffset = kPassedOffset + kPassedStages * kPassedBytes;
static_assert(kBarrierOffset + kBarrierBytes <= 225360, "the shared memory of the launch");

// The rank of a CTA in its cluster of two: 0 for the one that computes S and P, and 1 for the one that computes dP and
// dS.
__device__ __forceinline__ unsigned cluster_rank() { return blockIdx.x % 2; }

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // The emulator defines these itself.

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Commits this thread's bulk stores and reductions since the last commit as a group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the latest kPending groups of this thread's bulk stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
}

// Waits for all threads of the cluster that have not ended. Their accesses to shared memory before it, of any of its
// CTAs, are visible after it. The lanes of a warp have converged.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
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

// Returns the address of the same shared memory in the CTA of this rank in the cluster.
__device__ __forceinline__ unsigned remote_address(unsigned address, unsigned rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Arrives at the current phase of a barrier of another CTA in the cluster.
__device__ __forceinline__ void remote_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Starts a store of 16 bytes to the shared memory of another CTA in the cluster. They complete a transaction of a
// barrier of that CTA.
__device__ __forceinline__ void remote_store_16(unsigned destination, unsigned r0, unsigned r1, unsigned r2, unsigned r3,
                                                unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], { %1, %2, %3, %4}, [%5];"
               :: "r"(destination), "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(barrier) : "memory");
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

// Returns the float that 16 bits represent.
__device__ __forceinline__ float unpack_bf16(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
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
__device__ __forceinline__ void wgmma_shared_bf16<48, false>(
    float (&d)[24], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %26, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23"
               "}, %24, %25, p, 1, 1, 0, 0;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
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

  __device__ __forceinline__ unsigned resident() const { return base; }
  __device__ __forceinline__ unsigned streamed(int stage) const { return base + (kStreamedOffset + stage * kStreamedBytes); }
  __device__ __forceinline__ unsigned passed(int stage) const { return base + (kPassedOffset + stage * kPassedBytes); }
  __device__ __forceinline__ unsigned gradient() const { return base; }

  // streamed_full: a streamed tile has landed, and the tile that the CTA holds with the first. streamed_empty: every
  // warp that reads tiles has read it.
  __device__ __forceinline__ unsigned streamed_full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ unsigned streamed_empty(int stage) const { return barriers + 8 + stage * 16; }

  // passed_full: the fragments of the other CTA have landed. passed_empty: each warp of the other CTA that reads them
  // has read what this one has passed.
  __device__ __forceinline__ unsigned passed_full(int stage) const { return barriers + kStages * 16 + stage * 16; }
  __device__ __forceinline__ unsigned passed_empty(int stage) const { return barriers + kStages * 16 + 8 + stage * 16; }

  // Returns a pointer to what is at an address, for reads and writes by threads.
  template <typename T>
  __device__ __forceinline__ T* pointer(unsigned address) const {
    return reinterpret_cast<T*>(shared_memory + static_cast<int>(address - base));
  }

  // Initialises all mbarriers. One thread must call this. Other threads may use the mbarriers after a __syncthreads.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(streamed_full(stage), 1);
      mbarrier_init(streamed_empty(stage), cluster_rank() == 0 ? 12 : 4);
    }
    for (int stage = 0; stage < kPassedStages; ++stage) {
      mbarrier_init(passed_full(stage), 1);
      mbarrier_init(passed_empty(stage), cluster_rank() == 0 ? 4 : 8);
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

// Multiplies a warp's 16 rows by a factor, rounds them and stores them. They go through shared memory, where they are
// the first of the kPanelRows rows of each panel of columns, in the layout that TMA swizzles. TMA clips rows beyond the
// last one.
template <int kColumns, int kPanel, int kPanelRows>
__device__ __forceinline__ void store_rows(const float (&values)[kColumns / 2], float factor, unsigned tile,
                                           const TensorMap& map, int first_row, int head, int batch, int first_column) {
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
      tma_store_4d(map, tile + column * kPanelRows * kElementBytes, first_column + column, first_row, head, batch);
    }
    bulk_commit();
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

using Scores = Fragment<kTileK>;

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `query` is a position
// in the sequence. `key` is relative to the key tile, since the mainloop iterates over key tiles.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const BackwardDqArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: kTileQ queries of one head of one batch.
struct WorkTile { int first_query, head, batch; };

// The key tiles to visit for a query tile. The mainloop takes a step for each. Those from full_begin to full_end need
// no mask. begin, full_begin and full_end are indices of tiles; count is a number of tiles.
struct KeyTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_key(int step) const { return (begin + step) * kTileK; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

// Returns the key tiles of a work tile.
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const BackwardDqArguments& arguments) {
  const int q_first = work.first_query;
  const int q_last = min(work.first_query + kTileQ, arguments.len_q) - 1;
  // The bounds are half-open ranges of keys.
  const int first_key = 0;
  const int end_key = min(arguments.len_k, q_last + arguments.len_k - arguments.len_q + 1);
  const int full_first_key = 0;
  const int full_end_key = min(arguments.len_k, q_first + arguments.len_k - arguments.len_q + 1);
  const int first_tile = first_key / kTileK;
  const int count = end_key > first_key ? (end_key + kTileK - 1) / kTileK - first_tile : 0;
  return {first_tile, count, (full_first_key + kTileK - 1) / kTileK, full_end_key / kTileK};
}

// ---- The exchange between the CTAs ----------------------------------------------------------------------------------

// Passes the fragments of P or dS to the other CTA: those of a thread to the threads with the same scores.
__device__ __forceinline__ void pass_fragments(const unsigned (&fragments)[kTileK / 16][4], const SharedStorage& storage,
                                               PipelineState<kPassedStages> state) {
  const unsigned peer = cluster_rank() ^ 1, full = remote_address(storage.passed_full(state.stage()), peer);
  const unsigned slot = remote_address(storage.passed(state.stage()), peer) + threadIdx.x % 128 * 16;
  mbarrier_wait(storage.passed_empty(state.stage()), state.phase() ^ 1);
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    remote_store_16(slot + i * 128 * 16, fragments[i][0], fragments[i][1], fragments[i][2], fragments[i][3], full);
  }
}

// Loads the fragments that the other CTA has passed, and releases their stage. Exactly one of the warpgroups that load
// them announces the bytes of the stage's next phase.
__device__ __forceinline__ void load_passed(unsigned (&fragments)[kTileK / 16][4], bool announces,
                                            const SharedStorage& storage, PipelineState<kPassedStages> state) {
  mbarrier_wait(storage.passed_full(state.stage()), state.phase());
  if (announces && threadIdx.x % 128 == 0) mbarrier_arrive_expect_bytes(storage.passed_full(state.stage()), kPassedBytes);
  const uint4* const slot = storage.pointer<uint4>(storage.passed(state.stage())) + threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    const uint4 four = slot[i * 128];
    fragments[i][0] = four.x, fragments[i][1] = four.y, fragments[i][2] = four.z, fragments[i][3] = four.w;
  }
  __syncwarp();   // all lanes have read
  if (threadIdx.x % 32 == 0) remote_arrive(remote_address(storage.passed_empty(state.stage()), cluster_rank() ^ 1));
}

// Converts the fragments of P to float32.
__device__ __forceinline__ void unpack_scores(float (&scores)[Scores::kElements], const unsigned (&fragments)[kTileK / 16][4]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    scores[n] = unpack_bf16(fragments[n / 8][n / 2 % 4] >> n % 2 * 16 & 0xffff);
  }
}

// ---- The producer ---------------------------------------------------------------------------------------------------

// The producer: loads Q or dO of the work tile, and K or V of each iteration once its stage is empty.
__device__ __forceinline__ void producer(const WorkTile& work, const SharedStorage& storage,
                                         const BackwardDqArguments& arguments) {
  const TensorMap& query_map = cluster_rank() == 0 ? arguments.q_map : arguments.d_o_map;
  const TensorMap& key_map = cluster_rank() == 0 ? arguments.k_map : arguments.v_map;
  const KeyTiles tiles = key_tiles_of(work, arguments);
  // The KV head: head / heads_per_kv = umulhi(2 * head + 1, ceil(2^31 / heads_per_kv)), which is exact for head < 2^16
  // and heads_per_kv <= 2^13. The + 1 tolerates a reciprocal that is rounded in either direction.
  const int head_kv = __umulhi(2 * work.head + 1, arguments.kv_reciprocal);
  for (PipelineState<kStages> state = {0}; state.iteration < tiles.count; ++state) {
    const bool first = state.iteration == 0;
    const unsigned full = storage.streamed_full(state.stage());
    mbarrier_wait(storage.streamed_empty(state.stage()), state.phase() ^ 1);
    mbarrier_arrive_expect_bytes(full, kStreamedBytes + (first ? kResidentBytes : 0));
    load_rows<kTileK, kHeadDimPadded, kPanel>(storage.streamed(state.stage()), key_map, full, tiles.first_key(state.iteration),
                                              head_kv, work.batch);
    if (first) {
      load_rows<kTileQ, kHeadDimPadded, kPanel>(storage.resident(), query_map, full, work.first_query, work.head,
                                                work.batch);
    }
  }
}

// ---- The consumers --------------------------------------------------------------------------------------------------

// Loads LSE (to the base 2) and D of the lane's rows.
__device__ __forceinline__ void load_lse_and_d(float2 (&rows)[Scores::kRows], const Position& position,
                                               const BackwardDqArguments& arguments) {
  const long long head = static_cast<long long>(position.batch) * arguments.heads_q + position.head;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const int query = min(position.query + Scores::row_offset(r), arguments.rows - 1);
    rows[r] = *reinterpret_cast<const float2*>(arguments.lse_and_d + (head * arguments.rows + query) * 2);
  }
}

// Returns whether some row of the warp has a large LSE.
__device__ __forceinline__ bool has_large_lse(const float2 (&rows)[Scores::kRows]) {
  bool large = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) large |= fabsf(rows[r].x) > kLargeLse && fabsf(rows[r].x) < kNoLse;
  return __any_sync(0xffffffffu, large);
}

// Recomputes P in place of the products Q * K^T. P of masked-out scores is 0. With kMaskAndBounds, an exponent above
// -|LSE| * kLseRounding counts as 0: P is then at most 1, and exactly 1 if it differs from 1 by no more than the
// rounding of the LSE. Without it, rounding may put P slightly above 1.
template <Masking kMasking>
__device__ __forceinline__ void recompute_p(float (&scores)[Scores::kElements],
                                            const float2 (&rows)[Scores::kRows], const Position& position,
                                            int first_key, const BackwardDqArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const int q = position.query + Scores::row(n), k = first_key + position.key + Scores::column(n);
    const float lse = rows[Scores::row_index(n)].x;
    float exponent = fmaf(scores[n], kScoreToLog2, -lse);
    if (kMasking == Masking::kMaskAndBounds && exponent > fabsf(lse) * -kLseRounding) exponent = 0.0f;
    const float probability = exp2_approx(exponent);
    const bool allowed = kMasking == Masking::kNone ||
        (kMasking == Masking::kMask || k < arguments.len_k) & mask_mod(q, k, arguments);
    scores[n] = allowed ? probability : 0.0f;
  }
}

// Turns dP into dS = P * (dP - D) with D from the preprocess kernel.
__device__ __forceinline__ void compute_ds(float (&ds)[Scores::kElements],
                                           const float (&probabilities)[Scores::kElements],
                                           const float2 (&rows)[Scores::kRows]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    ds[n] = probabilities[n] * (ds[n] - (rows[Scores::row_index(n)].y));
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

// Starts the product of the tile of a CTA and a streamed tile: S = Q * K^T or dP = dO * V^T.
__device__ __forceinline__ void issue_qk_wgmma(float (&scores)[Scores::kElements], const SharedStorage& storage,
                                               PipelineState<kStages> state) {
  mbarrier_wait(storage.streamed_full(state.stage()), state.phase());
  issue_wgmma_ss<kHeadDimPadded, kPanel, kTileQ, kTileK>(scores, storage.resident(), storage.streamed(state.stage()));
}

// Returns the position of the first score of a lane in the warpgroup's rows.
__device__ __forceinline__ Position position_of(const WorkTile& work) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  return {work.batch, work.head, work.first_query + warp_row + lane / 4, lane % 4 * 2};
}

// The score warpgroup of the first CTA: computes S and P, and passes P to the other CTA.
__device__ __forceinline__ void compute_p(const WorkTile& work, const SharedStorage& storage,
                                          const BackwardDqArguments& arguments) {
  const Position position = position_of(work);
  const KeyTiles tiles = key_tiles_of(work, arguments);
  float scores[Scores::kElements];
  unsigned fragments[kTileK / 16][4];
  float2 rows[Scores::kRows];
  load_lse_and_d(rows, position, arguments);
  const bool large_lse = has_large_lse(rows);
  for (PipelineState<kStages> state = {0}; state.iteration < tiles.count; ++state) {
    issue_qk_wgmma(scores, storage, state);
    const int first_key = tiles.first_key(state.iteration);
    await_product<0>(scores);
    if (first_key + kTileK > arguments.len_k || large_lse) {
      recompute_p<Masking::kMaskAndBounds>(scores, rows, position, first_key, arguments);
    } else if (!tiles.full(state.iteration)) {
      recompute_p<Masking::kMask>(scores, rows, position, first_key, arguments);
    } else {
      recompute_p<Masking::kNone>(scores, rows, position, first_key, arguments);
    }
    release(storage.streamed_empty(state.stage()));
    pack_scores(fragments, scores);
    pass_fragments(fragments, storage, {state.iteration});
  }
}

// The score warpgroup of the second CTA: computes dP, dS from it and from P of the other CTA, and passes dS to that
// CTA.
__device__ __forceinline__ void compute_ds(const WorkTile& work, const SharedStorage& storage,
                                           const BackwardDqArguments& arguments) {
  const KeyTiles tiles = key_tiles_of(work, arguments);
  float ds[Scores::kElements], probabilities[Scores::kElements];
  unsigned fragments[kTileK / 16][4];
  float2 rows[Scores::kRows];
  load_lse_and_d(rows, position_of(work), arguments);
  for (PipelineState<kStages> state = {0}; state.iteration < tiles.count; ++state) {
    issue_qk_wgmma(ds, storage, state);
    load_passed(fragments, true, storage, {state.iteration});
    unpack_scores(probabilities, fragments);
    await_product<0>(ds);
    release(storage.streamed_empty(state.stage()));
    compute_ds(ds, probabilities, rows);
    pack_scores(fragments, ds);
    pass_fragments(fragments, storage, {state.iteration});
  }
}

// One half of the columns of a gradient, in two parts.
struct Gradient {
  float first[kFirstColumns / 2] = {}, second[kSecondColumns / 2] = {};
  int half;

  // Adds an iteration: the product of the fragments that the other CTA passes, and a streamed tile.
  __device__ __forceinline__ void accumulate(const SharedStorage& storage, PipelineState<kStages> state) {
    unsigned fragments[kTileK / 16][4];
    load_passed(fragments, half == 0 && cluster_rank() == 0, storage, {state.iteration});
    mbarrier_wait(storage.streamed_full(state.stage()), state.phase());
    const unsigned columns = storage.streamed(state.stage()) + half * kColumns * kTileK * kElementBytes;
    issue_wgmma_rs<kFirstColumns, kPanel, kTileK>(first, fragments, columns);
    issue_wgmma_rs<kSecondColumns, kPanel, kTileK>(second, fragments,
                                                      columns + kFirstColumns * kTileK * kElementBytes);
    await_product<1>(first);
    await_product<0>(second);
    release(storage.streamed_empty(state.stage()));
  }

  // Stores the warp's 16 rows times a factor. They overlay the tile of the CTA in shared memory.
  __device__ __forceinline__ void store(float factor, const SharedStorage& storage, const TensorMap& map, int first_row,
                                        int head, int batch) const {
    const unsigned rows_of_warp = storage.gradient() + threadIdx.x / 32 % 4 * 16 * kPanel * kElementBytes;
    const int column = half * kColumns, next = column + kFirstColumns;
    store_rows<kFirstColumns, kPanel, kTileQ>(
        first, factor, rows_of_warp + column * kTileQ * kElementBytes, map, first_row, head, batch, column);
    store_rows<kSecondColumns, kPanel, kTileQ>(
        second, factor, rows_of_warp + next * kTileQ * kElementBytes, map, first_row, head, batch, next);
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();   // before the CTA ends and its shared memory is freed
  }
};

// Sets columns of dQ to 0 in the rows that attend to no key, whatever K holds.
template <int kCount>
__device__ __forceinline__ void zero_empty_rows(float (&dq)[kCount], const float2 (&rows)[Scores::kRows]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (rows[Fragment<kCount * 2>::row_index(n)].x == kNoLse) dq[n] = 0.0f;
  }
}

// The other warpgroups of the first CTA: accumulate one half of the columns of dQ = dS * K each. Q, which dQ overlays
// in shared memory, has been read: dS of the last iteration follows from P.
__device__ __forceinline__ void accumulate(const WorkTile& work, int half, const SharedStorage& storage,
                                           const BackwardDqArguments& arguments) {
  Gradient gradient;
  gradient.half = half;
  const KeyTiles tiles = key_tiles_of(work, arguments);
  for (PipelineState<kStages> state = {0}; state.iteration < tiles.count; ++state) gradient.accumulate(storage, state);
  float2 rows[Scores::kRows];
  load_lse_and_d(rows, position_of(work), arguments);
  zero_empty_rows(gradient.first, rows);
  zero_empty_rows(gradient.second, rows);
  gradient.store(kScale, storage, arguments.dq_map, work.first_query + threadIdx.x / 32 % 4 * 16, work.head,
                 work.batch);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
attention_backward_dq_bf16_d512_causal_f8fefaed(const __grid_constant__ BackwardDqArguments arguments) {
  // Later queries attend to more keys, so the last tiles start first.
  const WorkTile work = {static_cast<int>((gridDim.x - 1 - blockIdx.x) / 2) * kTileQ, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};

  const unsigned shared = shared_address(shared_memory);
  const SharedStorage storage = {shared, shared + kBarrierOffset};
  if (threadIdx.x == 0) {
    storage.init_barriers();
    for (int stage = 0; stage < kPassedStages; ++stage) mbarrier_arrive_expect_bytes(storage.passed_full(stage), kPassedBytes);
  }
  __syncwarp();
  cluster_sync();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);   // uniform: a warp has one value
  if (warpgroup == 3) {
    registers_decrease<32>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) producer(work, storage, arguments);
    __syncwarp();
  } else if (warpgroup == 2) {
    registers_increase<144>();
    if (cluster_rank() == 0) compute_p(work, storage, arguments);
    else compute_ds(work, storage, arguments);
  } else {
    registers_increase<168>();
    if (cluster_rank() == 0) accumulate(work, warpgroup, storage, arguments);
  }
  cluster_sync();   // the other CTA has finished its accesses to this one's shared memory
}
