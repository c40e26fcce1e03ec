// flashgen: attention backward, dkdv, bf16-d256-causal-85c4309b
// Computes dK and dV; a CTA iterates over the queries of a key tile.
//
// mask     causal()
// score    none; scale 0.0625
// dropout  0
// dims     head 256, value 256; bfloat16, accumulated in float32
// target   sm_90a, family hopper
// plan     48 queries x 64 keys, one warpgroup for dV and one for dK, of 240 registers, 3 stages of Q and dO, 226560 bytes of shared memory
// FLOPs    2048 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      1032 * batch * heads_q * len_q + 2048 * batch * heads_kv * len_k bytes, at least
//
// Grid: one CTA per (key tile, KV head, batch). Reproduce with
//   flashgen show --pass backward --kernel dkdv --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":256,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.0625,"score":null,"value_dim":256,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct alignas(64) TensorMap {   // a CUtensorMap, which describes an array to TMA
  unsigned long long words[16];
};

struct BackwardDkdvArguments {
  TensorMap q_map;   // axes: column, row, head, batch; box: 64 columns x 48 rows
  TensorMap k_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap v_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap d_o_map;   // axes: column, row, head, batch; box: 64 columns x 48 rows
  TensorMap dk_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  TensorMap dv_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  const float* lse_and_d;   // (batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)
  int heads_q;
  int heads_per_kv;
  int len_q;
  int len_k;
  int rows;   // len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDimPadded = 256;   // a multiple of the depth of a wgmma; zeros beyond head_dim
constexpr int kValueDimPadded = 256;
constexpr int kConsumers = 2;   // consumer warpgroups, for P and dV and for dS and dK, beside the producer warpgroup
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kTileK = 64;   // keys of a work tile. S and P are held transposed: a row is a key, a column a query
constexpr int kTileQ = 48;   // queries of an iteration
constexpr int kStages = 3;   // of the pipelines of Q and dO in shared memory
constexpr int kExchangeStages = 2;   // of the pipeline by which one consumer warpgroup passes scores to the other
constexpr float kScale = 0.0625f;
constexpr float kScoreToLog2 = 0.0901684389f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
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
constexpr int kHeadPanel = 64;    // columns of Q, K and dK
constexpr int kValuePanel = 64;   // columns of dO, V and dV
constexpr int kElementBytes = sizeof(Element);

// Shared memory of a CTA, 226560 bytes, by offset:
//        0  K, 32768 bytes
//    32768  V, 32768 bytes
//    65536  Q, 3 x 24576 bytes
//   139264  dO, 3 x 24576 bytes
//   212992  P, 2 x 6144 bytes; in the order of the fragments
//   225280  L, D, 3 x 384 bytes
//   226432  mbarriers, 128 bytes
//        0  dK, 32768 bytes, overlays K
//    32768  dV, 32768 bytes, overlays V
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kQueryBytes = kTileQ * kHeadDimPadded * kElementBytes;
constexpr int kDoBytes = kTileQ * kValueDimPadded * kElementBytes;
constexpr int kExchangeBytes = kTileQ * kTileK * kElementBytes;
constexpr int kLseAndDBytes = kTileQ * sizeof(float2);
constexpr int kBarrierBytes = (4 * kStages + 2 * kExchangeStages) * 8;
constexpr int kValueOffset = kKeyBytes;
constexpr int kQueryOffset = kValueOffset + kValueBytes;
constexpr int kDoOffset = kQueryOffset + kStages * kQueryBytes;
constexpr int kExchangeOffset = kDoOffset + kStages * kDoBytes;
constexpr int kLseAndDOffset = kExchangeOffset + kExchangeStages * kExchangeBytes;
constexpr int kBarrierOffset = kLseAndDOffset + kStages * kLseAndDBytes;
constexpr int kDvOffset = kValueOffset;
static_assert(kBarrierOffset + kBarrierBytes <= 226560, "the shared memory of the launch");

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

// Waits until all but the latest kPending groups of this thread's bulk stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
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

// Arrives at barrier `id` of this many threads without waiting.
__device__ __forceinline__ void named_barrier_arrive(unsigned id, unsigned threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` and waits until this many threads have arrived. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
  asm volatile("barrier.sync.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
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
__device__ __forceinline__ void wgmma_registers_bf16<256, true>(
    float (&d)[128], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %133, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23, "
               " %24, %25, %26, %27, %28, %29, %30, %31, "
               " %32, %33, %34, %35, %36, %37, %38, %39, "
               " %40, %41, %42, %43, %44, %45, %46, %47, "
               " %48, %49, %50, %51, %52, %53, %54, %55, "
               " %56, %57, %58, %59, %60, %61, %62, %63, "
               " %64, %65, %66, %67, %68, %69, %70, %71, "
               " %72, %73, %74, %75, %76, %77, %78, %79, "
               " %80, %81, %82, %83, %84, %85, %86, %87, "
               " %88, %89, %90, %91, %92, %93, %94, %95, "
               " %96, %97, %98, %99, %100, %101, %102, %103, "
               " %104, %105, %106, %107, %108, %109, %110, %111, "
               " %112, %113, %114, %115, %116, %117, %118, %119, "
               " %120, %121, %122, %123, %124, %125, %126, %127"
               "}, { %128, %129, %130, %131}, %132, p, 1, 1, 1;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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

  __device__ __forceinline__ unsigned keys() const { return base; }
  __device__ __forceinline__ unsigned values() const { return base + kValueOffset; }
  __device__ __forceinline__ unsigned queries(int stage) const { return base + (kQueryOffset + stage * kQueryBytes); }
  __device__ __forceinline__ unsigned d_o(int stage) const { return base + (kDoOffset + stage * kDoBytes); }
  __device__ __forceinline__ unsigned exchange(int stage) const { return base + (kExchangeOffset + stage * kExchangeBytes); }
  __device__ __forceinline__ unsigned lse_and_d(int stage) const { return base + (kLseAndDOffset + stage * kLseAndDBytes); }
  __device__ __forceinline__ unsigned dk() const { return base; }
  __device__ __forceinline__ unsigned dv() const { return base + kDvOffset; }

  // queries_full: a tile of Q, LSE and D have landed, and K if it is the first of a work tile. d_o_full: a tile of dO
  // has landed, and V if it is the first of a work tile. queries_empty, d_o_empty: every consumer warp has read Q, or
  // dO.
  __device__ __forceinline__ unsigned queries_full(int stage) const { return barriers + stage * 32; }
  __device__ __forceinline__ unsigned queries_empty(int stage) const { return barriers + 8 + stage * 32; }
  __device__ __forceinline__ unsigned d_o_full(int stage) const { return barriers + 16 + stage * 32; }
  __device__ __forceinline__ unsigned d_o_empty(int stage) const { return barriers + 24 + stage * 32; }

  // exchange_full: each warp of a warpgroup has written what it passes to the other one. exchange_empty: each warp of
  // the other one has read it.
  __device__ __forceinline__ unsigned exchange_full(int stage) const { return barriers + kStages * 32 + stage * 16; }
  __device__ __forceinline__ unsigned exchange_empty(int stage) const { return barriers + kStages * 32 + 8 + stage * 16; }

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
    for (int stage = 0; stage < kExchangeStages; ++stage) {
      mbarrier_init(exchange_full(stage), 4);
      mbarrier_init(exchange_empty(stage), 4);
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

// The producer: loads Q, LSE, D and dO of each iteration once their stages are empty, and with the first
// iteration K and V.
__device__ __forceinline__ void producer(const WorkTile& work, const SharedStorage& storage,
                                         const BackwardDkdvArguments& arguments) {
  QueryIterator iterator(work, arguments);
  PipelineState<kStages> state = {0};
  for (bool first = true; !iterator.done(arguments); iterator.advance(work, arguments), ++state, first = false) {
    const int head = iterator.head(work, arguments);
    mbarrier_wait(storage.queries_empty(state.stage()), state.phase() ^ 1);
    mbarrier_arrive_expect_bytes(storage.queries_full(state.stage()), kQueryBytes + kLseAndDBytes + (first ? kKeyBytes : 0));
    load_rows<kTileQ, kHeadDimPadded, kHeadPanel>(storage.queries(state.stage()), arguments.q_map,
                                                  storage.queries_full(state.stage()), iterator.first_query(), head, work.batch);
    bulk_load(storage.lse_and_d(state.stage()), arguments.lse_and_d + workspace_row(iterator, work, arguments) * 2,
              kLseAndDBytes, storage.queries_full(state.stage()));
    if (first) {
      load_rows<kTileK, kHeadDimPadded, kHeadPanel>(storage.keys(), arguments.k_map, storage.queries_full(state.stage()),
                                                    work.first_key, work.head_kv, work.batch);
    }
    mbarrier_wait(storage.d_o_empty(state.stage()), state.phase() ^ 1);
    mbarrier_arrive_expect_bytes(storage.d_o_full(state.stage()), kDoBytes + (first ? kValueBytes : 0));
    load_rows<kTileQ, kValueDimPadded, kValuePanel>(storage.d_o(state.stage()), arguments.d_o_map,
          storage.d_o_full(state.stage()), iterator.first_query(), head, work.batch);
    if (first) {
      load_rows<kTileK, kValueDimPadded, kValuePanel>(storage.values(), arguments.v_map,
            storage.d_o_full(state.stage()), work.first_key, work.head_kv, work.batch);
    }
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

// Returns where a thread exchanges the fragments of P with the thread of the other warpgroup that has the same scores.
__device__ __forceinline__ uint4* exchange_at(const SharedStorage& storage, int stage) {
  return storage.pointer<uint4>(storage.exchange(stage)) + threadIdx.x % 128;
}

__device__ __forceinline__ void store_exchanged(const unsigned (&fragments)[kTileQ / 16][4],
                                                const SharedStorage& storage, int stage) {
#pragma unroll
  for (int i = 0; i < kTileQ / 16; ++i) {
    exchange_at(storage, stage)[i * 128] = make_uint4(fragments[i][0], fragments[i][1], fragments[i][2], fragments[i][3]);
  }
}

__device__ __forceinline__ void load_exchanged(float (&probabilities)[kTileQ / 2], const SharedStorage& storage, int stage) {
#pragma unroll
  for (int i = 0; i < kTileQ / 16; ++i) {
    const uint4 fragment = exchange_at(storage, stage)[i * 128];
    const unsigned pairs[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) probabilities[i * 8 + e] = unpack_bf16(pairs[e / 2] >> e % 2 * 16 & 0xffff);
  }
}

// The first consumer warpgroup: computes S = Q * K^T and P, and accumulates dV = P^T * dO. The exponentials of an
// iteration run while the wgmma of the previous one does. It passes P to the other warpgroup.
__device__ __forceinline__ void consumer_dv(const WorkTile& work, const SharedStorage& storage,
                                            const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  Position position = {work.batch, 0, lane % 4 * 2, work.first_key + warp_row + lane / 4};
  float dv[kValueDimPadded / 2] = {}, scores[kTileQ / 2];
  unsigned fragments[kTileQ / 16][4];
  const auto issue_qk_wgmma = [&](PipelineState<kStages> state) {
    mbarrier_wait(storage.queries_full(state.stage()), state.phase());
    issue_wgmma_ss<kHeadDimPadded, kHeadPanel, kTileK, kTileQ>(scores, storage.keys(), storage.queries(state.stage()));
  };
  QueryIterator iterator(work, arguments);
  const auto compute_p = [&](PipelineState<kStages> state) {
    const int first_query = iterator.first_query();
    const unsigned char* lse_and_d = storage.pointer<unsigned char>(storage.lse_and_d(state.stage()));
    position.head = iterator.head(work, arguments);
    if (work.first_key + kTileK > arguments.len_k || has_large_lse(lse_and_d)) {
      recompute_p<Masking::kMaskAndBounds>(scores, lse_and_d, position, first_query, arguments);
    } else if (!iterator.tiles.full(iterator.step)) {
      recompute_p<Masking::kMask>(scores, lse_and_d, position, first_query, arguments);
    } else {
      recompute_p<Masking::kNone>(scores, lse_and_d, position, first_query, arguments);
    }
    __syncwarp();   // all lanes have read LSE and D
    release(storage.queries_empty(state.stage()));
  };
  const auto pack_p = [&](PipelineState<kExchangeStages> exchange_state) {
    pack_scores(fragments, scores);
    mbarrier_wait(storage.exchange_empty(exchange_state.stage()), exchange_state.phase() ^ 1);
    store_exchanged(fragments, storage, exchange_state.stage());
    __syncwarp();
    release(storage.exchange_full(exchange_state.stage()));
  };

  PipelineState<kStages> state = {0};
  if (!iterator.done(arguments)) {
    issue_qk_wgmma(state);
    await_product<0>(scores);
    compute_p(state);
    pack_p({state.iteration});
    for (iterator.advance(work, arguments); !iterator.done(arguments); iterator.advance(work, arguments), ++state) {
      issue_qk_wgmma(state + 1);
      mbarrier_wait(storage.d_o_full(state.stage()), state.phase());
      issue_wgmma_rs<kValueDimPadded, kValuePanel, kTileQ>(dv, fragments, storage.d_o(state.stage()));
      await_product<1>(scores);
      compute_p(state + 1);
      await_product<0>(dv);
      release(storage.d_o_empty(state.stage()));
      pack_p({state.iteration + 1});
    }
    mbarrier_wait(storage.d_o_full(state.stage()), state.phase());
    issue_wgmma_rs<kValueDimPadded, kValuePanel, kTileQ>(dv, fragments, storage.d_o(state.stage()));
    await_product<0>(dv);
  }
  // The epilogue: dV overlays V once the other warpgroup has read V. This one has read K.
  named_barrier_arrive(1, kConsumers * 128);
  named_barrier_sync(2, kConsumers * 128);
  store_rows<kValueDimPadded, kValuePanel, kTileK>(
      dv, 1.0f, storage.dv() + warp_row * kValuePanel * kElementBytes, arguments.dv_map,
      work.first_key + warp_row, work.head_kv, work.batch);
  if (lane == 0) bulk_wait_read<0>();   // before the CTA ends and its shared memory is freed
}

// The second consumer warpgroup: computes dP = dO * V^T, computes dS from dP and from what the other warpgroup passes
// to it, and accumulates dK = dS^T * Q.
__device__ __forceinline__ void consumer_dk(const WorkTile& work, const SharedStorage& storage,
                                            const BackwardDkdvArguments& arguments) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  float dk[kHeadDimPadded / 2] = {}, ds[kTileQ / 2];
  unsigned fragments[kTileQ / 16][4];
  const auto issue_dp_wgmma = [&](PipelineState<kStages> state) {
    mbarrier_wait(storage.d_o_full(state.stage()), state.phase());
    issue_wgmma_ss<kValueDimPadded, kValuePanel, kTileK, kTileQ>(ds, storage.values(),
                                                                 storage.d_o(state.stage()));
  };
  const auto finish_ds = [&](PipelineState<kStages> state) {
    const PipelineState<kExchangeStages> exchange_state = {state.iteration};
    float probabilities[kTileQ / 2];
    release(storage.d_o_empty(state.stage()));
    mbarrier_wait(storage.exchange_full(exchange_state.stage()), exchange_state.phase());
    load_exchanged(probabilities, storage, exchange_state.stage());
    __syncwarp();
    release(storage.exchange_empty(exchange_state.stage()));
    mbarrier_wait(storage.queries_full(state.stage()), state.phase());   // LSE and D have landed with Q
    const unsigned char* lse_and_d = storage.pointer<unsigned char>(storage.lse_and_d(state.stage()));
    compute_ds(ds, probabilities, lse_and_d);
  };

  PipelineState<kStages> state = {0};
  QueryIterator iterator(work, arguments);
  if (!iterator.done(arguments)) {
    issue_dp_wgmma(state);
    await_product<0>(ds);
    finish_ds(state);
    pack_scores(fragments, ds);
    for (iterator.advance(work, arguments); !iterator.done(arguments); iterator.advance(work, arguments), ++state) {
      issue_dp_wgmma(state + 1);
      issue_wgmma_rs<kHeadDimPadded, kHeadPanel, kTileQ>(dk, fragments, storage.queries(state.stage()));
      await_product<1>(ds);
      finish_ds(state + 1);
      await_product<0>(dk);
      release(storage.queries_empty(state.stage()));
      pack_scores(fragments, ds);
    }
    issue_wgmma_rs<kHeadDimPadded, kHeadPanel, kTileQ>(dk, fragments, storage.queries(state.stage()));
    await_product<0>(dk);
  }
  // The epilogue: dK overlays K once the other warpgroup has read K. This one has read V.
  named_barrier_arrive(2, kConsumers * 128);
  named_barrier_sync(1, kConsumers * 128);
  store_rows<kHeadDimPadded, kHeadPanel, kTileK>(
      dk, kScale, storage.dk() + warp_row * kHeadPanel * kElementBytes, arguments.dk_map,
      work.first_key + warp_row, work.head_kv, work.batch);
  if (lane == 0) bulk_wait_read<0>();   // before the CTA ends and its shared memory is freed
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_dkdv_bf16_d256_causal_85c4309b(const __grid_constant__ BackwardDkdvArguments arguments) {
  const WorkTile work = {static_cast<int>(blockIdx.x) * kTileK, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  const unsigned shared = shared_address(shared_memory);
  const SharedStorage storage = {shared, shared + kBarrierOffset};
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);   // uniform: a warp has one value
  if (warpgroup == kConsumers) {
    registers_decrease<24>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) producer(work, storage, arguments);
  } else {
    registers_increase<240>();
    if (warpgroup == 0) consumer_dv(work, storage, arguments);
    else consumer_dk(work, storage, arguments);
  }
}
