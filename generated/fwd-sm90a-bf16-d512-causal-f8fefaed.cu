// flashgen: attention forward, bf16-d512-causal-f8fefaed
//
// mask     causal()
// score    none; scale 0.0441941738
// dropout  0
// dims     head 512, value 512; bfloat16, accumulated in float32; heads_q a multiple of heads_kv
// target   sm_90a, family hopper
// plan     64 queries x 64 keys, 2 warpgroup(s) of 240 registers that share 64 rows, 1 stage(s) of K and V, 215192 bytes of shared memory
// method   online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): row_max is the paper's running maximum m, which may lag; sum is its row sum l
//          a producer warp loads; the softmax of a warpgroup overlaps products of another (Shah et al. 2024)
// FLOPs    2048 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      2052 * batch * heads_q * len_q + 2048 * batch * heads_kv * len_k bytes, at least
//
// Grid: persistent, one CTA per multiprocessor; work tiles are (query tile, query head, batch). Reproduce with
//   flashgen show --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":512,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.044194173824159216,"score":null,"value_dim":512,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct alignas(64) TensorMap {   // a CUtensorMap, which describes an array to TMA
  unsigned long long words[16];
};

struct ForwardArguments {
  TensorMap q_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap k_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap v_map;   // axes: column, row, head, batch; box: 64 columns x 64 rows
  TensorMap o_map;   // axes: column, row, head, batch; box: 64 columns x 16 rows
  float* lse;   // (batch, heads_q, len_q), or null
  unsigned* next_tile;   // counts fetched work tiles: 0 before and after a launch; null if each CTA has one work tile
  int tiles;   // query tiles of all heads and batches
  int tiles_q;   // query tiles of each head
  int heads;   // query heads of all batch entries
  int section;   // heads whose tiles are interleaved, so few that their K and V stay in L2
  int heads_q;
  int len_q;
  int len_k;
  unsigned kv_reciprocal;   // 2^31 / (query heads per KV head), rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 512;
constexpr int kValueDim = 512;
constexpr int kHeadDimPadded = 512;   // a multiple of the depth of a wgmma; zeros beyond kHeadDim
constexpr int kValueDimPadded = 512;
constexpr int kConsumers = 2;   // consumer warpgroups, beside the producer warpgroup
constexpr int kRowGroups = kConsumers / 2;   // groups of 64 rows: their warpgroups share the output's columns
constexpr int kOutputColumns = kValueDimPadded / 2;   // of a consumer warpgroup
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPartQ = 64;   // queries per warpgroup, one per row
constexpr int kTileQ = kRowGroups * kPartQ;
constexpr int kTileK = 64;   // keys per step
constexpr int kStages = 1;   // of the pipelines of K and V tiles in shared memory
constexpr int kKeyParts = 4;   // parts of a tile of K; each has its own pipeline stage
constexpr int kKeyColumns = kHeadDimPadded / kKeyParts;   // of a part of K
constexpr int kKeyStages = kKeyParts * kStages;   // of the pipeline of parts of K
constexpr int kValueStages = 2 * kStages;   // of the pipeline of halves of V tiles, of kOutputColumns columns
constexpr int kPassedStages = 2;   // of the pipeline of P tiles between consumer warpgroups
constexpr float kScoreToLog2 = 0.063758716f;   // scale * log2(e): exp(x) is computed as exp2(x * log2(e))
// Row maxima with |row_max| below this are folded into the FMA of the exponent: see RowState::offset.
constexpr float kMaxFoldedRowMax = 263136048.0f;
// The rescaling threshold, in log2: a row's row_max may be less than the true maximum by this much.
constexpr float kRescaleThreshold = 8.0f;

// A tile in shared memory is stored in panels, blocks of columns as wide as the TMA swizzle: the first kHeadPanel
// columns of all rows, then the next ones. Within a row of a panel, the swizzle permutes chunks of 16 bytes.
constexpr int kHeadPanel = 64;    // columns of Q and K
constexpr int kValuePanel = 64;   // columns of V and the output
constexpr int kPassedPanel = 64;   // columns of P
constexpr int kElementBytes = sizeof(Element);
// Shared memory of a CTA, 215192 bytes, by offset:
//        0  each warpgroup (Q, then O), 1 x 65536 bytes
//    65536  K, 4 x 16384 bytes
//   131072  V, 2 x 32768 bytes
//   196608  P of a step (P, factors of the output), 2 x 9216 bytes
//   215040  mbarriers, 144 bytes
//   215184  work tile index, 8 bytes
constexpr int kWarpgroupQueryBytes = 64 * kHeadDimPadded * kElementBytes;
constexpr int kWarpgroupOutputBytes = 64 * kValueDimPadded * kElementBytes;
constexpr int kWarpgroupBytes = kWarpgroupQueryBytes > kWarpgroupOutputBytes ? kWarpgroupQueryBytes : kWarpgroupOutputBytes;
constexpr int kKeyBytes = kTileK * kKeyColumns * kElementBytes;
constexpr int kValueBytes = kTileK * kOutputColumns * kElementBytes;
constexpr int kPBytes = 64 * kTileK * kElementBytes;
constexpr int kFactorsBytes = 128 * sizeof(float2);
constexpr int kPassedBytes = kPBytes + kFactorsBytes;
constexpr int kBarrierBytes = (2 + 2 * kKeyStages + 2 * kValueStages + 2 * kPassedStages) * 8;
constexpr int kIndexBytes = 8;
constexpr int kKeyOffset = kRowGroups * kWarpgroupBytes;
constexpr int kValueOffset = (kKeyOffset + kKeyStages * kKeyBytes + 1023) / 1024 * 1024;
constexpr int kPassedOffset = (kValueOffset + kValueStages * kValueBytes + 1023) / 1024 * 1024;
constexpr int kBarrierOffset = kPassedOffset + kPassedStages * kPassedBytes;
constexpr int kIndexOffset = kBarrierOffset + kBarrierBytes;
static_assert(kIndexOffset + kIndexBytes <= 215192, "the shared memory of the launch");
static_assert(kTileK % 16 == 0 && kTileK <= 256 && kOutputColumns <= 256, "what one wgmma and one copy take");

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

// Returns the logarithm of x to base 2, from the special-function unit.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
__device__ __forceinline__ void wgmma_shared_bf16<256, true>(
    float (&d)[128], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"
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
               "}, %128, %129, p, 1, 1, 0, 1;\n\t}"
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

// Returns -inf.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Returns the maximum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Returns the sum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
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
using Output = Fragment<kOutputColumns>;

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

  __device__ __forceinline__ unsigned queries(int warpgroup) const { return base + warpgroup * kWarpgroupBytes; }
  __device__ __forceinline__ unsigned output(int warpgroup) const { return base + warpgroup * kWarpgroupBytes; }
  __device__ __forceinline__ unsigned keys(int stage) const { return base + (kKeyOffset + stage * kKeyBytes); }
  __device__ __forceinline__ unsigned values(int stage) const { return base + (kValueOffset + stage * kValueBytes); }
  __device__ __forceinline__ unsigned probabilities(int stage) const { return base + (kPassedOffset + stage * kPassedBytes); }
  __device__ __forceinline__ unsigned factors(int stage) const { return base + (kPassedOffset + stage * kPassedBytes + kPBytes); }

  // queries_full: Q of a work tile has landed. queries_empty: every consumer warp has read it.
  __device__ __forceinline__ unsigned queries_full() const { return barriers; }
  __device__ __forceinline__ unsigned queries_empty() const { return barriers + 8; }

  // keys_full: a part of the columns of a tile of K has landed. keys_empty: every warp of the first warpgroup has read
  // it.
  __device__ __forceinline__ unsigned keys_full(int stage) const { return barriers + 16 + stage * 16; }
  __device__ __forceinline__ unsigned keys_empty(int stage) const { return barriers + 24 + stage * 16; }

  // values_full: half of the columns of a tile of V has landed. values_empty: every warp of the warpgroup with these
  // columns of the output has read it.
  __device__ __forceinline__ unsigned values_full(int stage) const { return barriers + kKeyStages * 16 + 16 + stage * 16; }
  __device__ __forceinline__ unsigned values_empty(int stage) const { return barriers + kKeyStages * 16 + 24 + stage * 16; }

  // passed_full: each warp of the first warpgroup has written its rows of P, or its row states. passed_empty: each warp
  // of the second one has read them.
  __device__ __forceinline__ unsigned passed_full(int stage) const { return barriers + kKeyStages * 16 + kValueStages * 16 + 16 + stage * 16; }
  __device__ __forceinline__ unsigned passed_empty(int stage) const { return barriers + kKeyStages * 16 + kValueStages * 16 + 24 + stage * 16; }

  // Returns a pointer to what is at an address, for reads and writes by threads.
  template <typename T>
  __device__ __forceinline__ T* pointer(unsigned address) const {
    return reinterpret_cast<T*>(shared_memory + static_cast<int>(address - base));
  }

  // The index of the work tile of Q, written before Q is loaded and read when it has landed.
  static __device__ __forceinline__ int& tile_index() { return *reinterpret_cast<int*>(shared_memory + kIndexOffset); }

  // Initialises all mbarriers. One thread must call this. Other threads may use the mbarriers after a __syncthreads.
  __device__ __forceinline__ void init_barriers() const {
    mbarrier_init(queries_full(), 1);
    mbarrier_init(queries_empty(), kConsumers * 4);
    for (int stage = 0; stage < kKeyStages; ++stage) {
      mbarrier_init(keys_full(stage), 1);
      mbarrier_init(keys_empty(stage), 4);
    }
    for (int stage = 0; stage < kValueStages; ++stage) {
      mbarrier_init(values_full(stage), 1);
      mbarrier_init(values_empty(stage), 4);
    }
    for (int stage = 0; stage < kPassedStages; ++stage) {
      mbarrier_init(passed_full(stage), 4);
      mbarrier_init(passed_empty(stage), 4);
    }
    mbarrier_fence_init();
  }
};

// Lane 0 arrives at a barrier for its warp. Precondition: all lanes have finished their accesses, which a warp-wide
// instruction ensures, such as __syncwarp or the wait for a wgmma.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// The position of the first part of a tile of K in its pipeline.
__device__ __forceinline__ PipelineState<kKeyStages> key_part_of(PipelineState<kStages> tile) {
  return {tile.iteration * kKeyParts};
}

// The position of half of the columns of a tile of V in its pipeline: 0 for the first columns, 1 for the last ones.
__device__ __forceinline__ PipelineState<kValueStages> value_half_of(PipelineState<kStages> tile, int half) {
  return {tile.iteration * 2 + half};
}

// Releases the parts of a tile of K in order, each as soon as its wgmmas are complete. Up to kPending groups of wgmmas
// that were committed after those of the scores may still be in flight.
template <int kPending>
__device__ __forceinline__ void release_keys(const SharedStorage& storage, PipelineState<kKeyStages> part) {
  wgmma_wait<kPending + 3>();
  release(storage.keys_empty(part++.stage()));
  wgmma_wait<kPending + 2>();
  release(storage.keys_empty(part++.stage()));
  wgmma_wait<kPending + 1>();
  release(storage.keys_empty(part++.stage()));
  wgmma_wait<kPending>();
  release(storage.keys_empty(part.stage()));
}

// Starts copying kRows rows from first_row on, panel by panel. They complete on `barrier`, which must expect them.
template <int kRows, int kColumns, int kPanel>
__device__ __forceinline__ void load_rows(unsigned tile, const TensorMap& map, unsigned barrier, int first_row, int head,
                                          int batch) {
#pragma unroll 1   // the producer has few registers
  for (int column = 0; column < kColumns; column += kPanel)
    tma_load_4d(tile + column * kRows * kElementBytes, map, barrier, column, first_row, head, batch);
}

// Starts copying kTileK rows of the columns first <= column < end once their memory is empty. `phase` is that of the
// full barrier.
template <int kPanel>
__device__ __forceinline__ void load_columns(unsigned memory, const TensorMap& map, unsigned empty, unsigned full, unsigned phase,
                                             int first, int end, int first_key, int head, int batch) {
  mbarrier_wait(empty, phase ^ 1);
  mbarrier_arrive_expect_bytes(full, kTileK * (end - first) * kElementBytes);
#pragma unroll 1   // the producer has few registers
  for (int column = first; column < end; column += kPanel) {
    tma_load_4d(memory + (column - first) * kTileK * kElementBytes, map, full, column, first_key, head, batch);
  }
}

// Rounds a warp's 16 rows of the output and stores them from row first_row of the tensor on, if the rows exist
// (`has_rows`). They go through shared memory, where a panel of columns holds the warpgroup's 64 rows in the layout
// that TMA swizzles. TMA clips rows beyond the last query. Lane 0 alone issues the stores: only its first_row and
// has_rows count.
__device__ __forceinline__ void store_rows(const float (&output)[kOutputColumns / 2], unsigned tile,
                                           const TensorMap& map, bool has_rows, int first_row, int head, int batch, int first_column) {
  constexpr int kChunks = kValuePanel / 8;   // 16-byte chunks of a panel's row
  // warp_row is the first of the warp's rows among the 64 of its warpgroup.
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const int row = warp_row + lane % 16, swizzle = row / (8 / kChunks) % kChunks;
#pragma unroll
  for (int n = 0; n < kOutputColumns / 2; n += 8) {
    const int panel = n / 4 / kChunks, chunk = (n / 4 % kChunks + lane / 16) ^ swizzle;
    store_matrix_x4(tile + ((panel * 64 + row) * kChunks + chunk) * 16, pack_bf16(output[n], output[n + 1]),
                    pack_bf16(output[n + 2], output[n + 3]), pack_bf16(output[n + 4], output[n + 5]),
                    pack_bf16(output[n + 6], output[n + 7]));
  }
  fence_async_shared();
  __syncwarp();
  if (lane == 0 && has_rows) {
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kValuePanel) {
      const unsigned source = tile + (column * 64 + warp_row * kValuePanel) * kElementBytes;
      tma_store_4d(map, source, first_column + column, first_row, head, batch);
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// Issues the wgmmas of scores = Q * K^T for the rows of a warpgroup and a tile of K, part by part as they land. The
// wgmmas of each part are a commit group. `queries` is a shared memory address.
__device__ __forceinline__ void issue_qk_wgmma(float (&scores)[kTileK / 2], unsigned queries, const SharedStorage& storage,
                                               PipelineState<kKeyStages> part) {
  constexpr int kSwizzle = kHeadPanel * kElementBytes;
  order_registers(scores);
  wgmma_fence();
  // The compiler would otherwise hold the descriptors of all parts of the depth in registers.
  const unsigned long long a = matrix_descriptor<kSwizzle>(opaque(queries), 16, 8 * kSwizzle);
#pragma unroll
  for (int first = 0; first < kHeadDimPadded; first += kKeyColumns, ++part) {
    mbarrier_wait(storage.keys_full(part.stage()), part.phase());
    const unsigned long long b = matrix_descriptor<kSwizzle>(storage.keys(part.stage()), 16, 8 * kSwizzle);
#pragma unroll
    for (int depth = 0; depth < kKeyColumns; depth += 16) {
      const int panel = depth / kHeadPanel, column = depth % kHeadPanel * kElementBytes / 16;   // descriptors count in 16 bytes
      wgmma_shared_bf16<kTileK, false>(scores, a + ((first / kHeadPanel + panel) * 64 * kSwizzle / 16 + column),
                                      b + (panel * kTileK * kSwizzle / 16 + column), first + depth > 0);
    }
    wgmma_commit();
  }
}

// Issues the wgmmas of output += P * V; `values` is the shared memory address of V, whose rows are the reduction
// dimension.
__device__ __forceinline__ void issue_pv_wgmma(float (&output)[kOutputColumns / 2],
                                               const unsigned (&probabilities)[kTileK / 16][4], unsigned values) {
  constexpr int kSwizzle = kValuePanel * kElementBytes;
  order_registers(output);
  wgmma_fence();
  const unsigned long long b = matrix_descriptor<kSwizzle>(values, kTileK * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kTileK; depth += 16) {
    wgmma_registers_bf16<kOutputColumns, true>(output, probabilities[depth / 16], b + depth * kSwizzle / 16, true);
  }
  wgmma_commit();
}

// Waits until the product is computed, while at most kPending groups of wgmmas that started later still run.
template <int kPending, int kCount>
__device__ __forceinline__ void await_product(float (&product)[kCount]) {
  wgmma_wait<kPending>();
  order_registers(product);
}

// Multiplies the rows of the output by one factor each.
__device__ __forceinline__ void rescale(float (&output)[kOutputColumns / 2], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kOutputColumns / 2; ++n) output[n] *= factor[Output::row_index(n)];
}

// ---- The softmax ----------------------------------------------------------------------------------------------------

// The running state of a row: the row maximum m, which may lag, and this lane's part of the row sum l of the
// probabilities exp(scale * (s - m)), which are computed as 2^((s - m) * kScoreToLog2). s and m are scores before the
// scale.
struct RowState {
  float row_max = minus_infinity(), sum = 0.0f;

  // The offset that folds the row maximum into the fused multiply-add of an exponent. It is usable if the row has seen
  // a key, so that its maximum is finite, and if |row_max * kScoreToLog2| < 2^24. Then rounding of this product changes
  // the exponent by at most 1/2, and P by at most a factor sqrt(2), which is the same for all P with this row_max. A
  // score of this size is itself rounded by as much.
  __device__ __forceinline__ float offset() const { return -row_max * kScoreToLog2; }
  __device__ __forceinline__ bool offset_is_usable() const { return fabsf(row_max) < kMaxFoldedRowMax; }

  // Raises the row maximum, rescales the sum and returns the factor that rescales the output. A row without a key has
  // nothing to rescale, and -inf - -inf would be NaN.
  __device__ __forceinline__ float update_row_max(float maximum) {
    const float old = row_max;
    row_max = fmaxf(old, maximum);
    const float rescale_factor = row_max == minus_infinity() ? 1.0f : exp2_approx((old - row_max) * kScoreToLog2);
    sum *= rescale_factor;
    return rescale_factor;
  }
};

// Returns the largest score of the lane's row r.
__device__ __forceinline__ float row_maximum(const float (&scores)[Scores::kElements], int r) {
  float even = scores[Scores::pair(r, 0)], odd = scores[Scores::pair(r, 0) + 1];   // two independent chains
#pragma unroll
  for (int j = 1; j < Scores::kPairs; ++j) {
    even = fmaxf(even, scores[Scores::pair(r, j)]);
    odd = fmaxf(odd, scores[Scores::pair(r, j) + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

// Subtracts the row maximum from each score. This is for row maxima that cannot be used as offsets: it avoids the
// rounding error of row_max * kScoreToLog2, at the cost of one more operation per score.
__device__ __forceinline__ void subtract_row_max(float (&scores)[Scores::kElements], const RowState (&rows)[Scores::kRows]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const float row_max = rows[Scores::row_index(n)].row_max;
    scores[n] -= row_max == minus_infinity() ? 0.0f : row_max;
  }
}

// Rounds probabilities to the input's type, as the operand of P * V, 16 keys at a time.
__device__ __forceinline__ void round_probabilities(unsigned (&operand)[kTileK / 16][4],
                                                    const float (&probabilities)[Scores::kElements]) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; n += 2) {
    operand[n / 8][n / 2 % 4] = pack_bf16(probabilities[n], probabilities[n + 1]);
  }
}

// Turns a tile of scores into probabilities and adds them to the row sums. Rescaling is lazy: row maxima change only if
// a score of some row of the warp exceeds the row's maximum by kRescaleThreshold. Then the result is true, and the
// output must be multiplied by `rescale_factor`. This runs beside P * V, as no other warpgroup has scores whose
// products could run beside it.
__device__ __forceinline__ bool online_softmax(float (&scores)[Scores::kElements], RowState (&rows)[Scores::kRows],
                                               float (&rescale_factor)[Scores::kRows]) {
  float maximum[Scores::kRows];
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    maximum[r] = row_maximum(scores, r);
    outgrown |= (maximum[r] - rows[r].row_max) * kScoreToLog2 > kRescaleThreshold;
  }
  outgrown = __any_sync(0xffffffffu, outgrown);
  if (outgrown) {
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) rescale_factor[r] = rows[r].update_row_max(maximum[r]);
  }
  const bool by_offsets = __all_sync(0xffffffffu, rows[0].offset_is_usable() && rows[1].offset_is_usable());
  if (!by_offsets) subtract_row_max(scores, rows);
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    const float offset = by_offsets ? rows[r].offset() : 0.0f;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < Scores::kPairs; ++j) {
      const int n = Scores::pair(r, j);
      even += scores[n] = exp2_approx(fmaf(scores[n], kScoreToLog2, offset));
      odd += scores[n + 1] = exp2_approx(fmaf(scores[n + 1], kScoreToLog2, offset));
    }
    rows[r].sum += even + odd;
  }
  return outgrown;
}

// Passes P of a step to the other warpgroup, in the layout in which wgmma reads its operand A, and the factors of a
// lane's two rows by which it multiplies its columns of the output before.
__device__ __forceinline__ void pass_probabilities(const unsigned (&probabilities)[kTileK / 16][4], float2 factors,
                                                   const SharedStorage& storage, PipelineState<kPassedStages> state) {
  constexpr int kChunks = kPassedPanel / 8;   // 16-byte chunks of a panel's row
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16, swizzle = row / (8 / kChunks) % kChunks;
  const unsigned tile = storage.probabilities(state.stage());
  mbarrier_wait(storage.passed_empty(state.stage()), state.phase() ^ 1);
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    const int panel = 2 * i / kChunks, chunk = (2 * i % kChunks + lane / 16) ^ swizzle;
    store_matrix_x4(tile + ((panel * 64 + row) * kChunks + chunk) * 16, probabilities[i][0], probabilities[i][1],
                    probabilities[i][2], probabilities[i][3]);
  }
  storage.pointer<float2>(storage.factors(state.stage()))[threadIdx.x % 128] = factors;
  fence_async_shared();   // wgmma reads shared memory through the async proxy
  __syncwarp();
  release(storage.passed_full(state.stage()));
}

// Passes the states of a lane's two rows after the last step of a work tile, in the place of P.
__device__ __forceinline__ void pass_rows(const RowState (&rows)[Scores::kRows], const SharedStorage& storage,
                                          PipelineState<kPassedStages> state) {
  mbarrier_wait(storage.passed_empty(state.stage()), state.phase() ^ 1);
  storage.pointer<float4>(storage.probabilities(state.stage()))[threadIdx.x % 128] =
      make_float4(rows[0].row_max, rows[0].sum, rows[1].row_max, rows[1].sum);
  __syncwarp();
  release(storage.passed_full(state.stage()));
}

// Issues the wgmmas of output += P * V for the last columns of V, whose address is `values`; P is in shared memory.
__device__ __forceinline__ void issue_passed_pv_wgmma(float (&output)[kOutputColumns / 2], unsigned probabilities,
                                                      unsigned values) {
  constexpr int kSwizzle = kValuePanel * kElementBytes, kPassedSwizzle = kPassedPanel * kElementBytes;
  order_registers(output);
  wgmma_fence();
  const unsigned long long a = matrix_descriptor<kPassedSwizzle>(probabilities, 16, 8 * kPassedSwizzle);
  const unsigned long long b = matrix_descriptor<kSwizzle>(values, kTileK * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kTileK; depth += 16) {
    const int panel = depth / kPassedPanel, column = depth % kPassedPanel;   // descriptors count in 16 bytes
    wgmma_shared_bf16<kOutputColumns, true>(output, a + (panel * 64 * kPassedSwizzle + column * kElementBytes) / 16,
                                            b + depth * kSwizzle / 16, true);
  }
  wgmma_commit();
}

// ---- The variant ----------------------------------------------------------------------------------------------------

// The position of a lane's scores: batch, query head, and the lane's first query and first key. `query` is a position
// in the sequence. `key` is relative to the key tile, since the mainloop iterates over key tiles.
struct Position {
  int batch, head, query, key;
};

// Mask causal(): returns whether query q may attend to key k.
__device__ __forceinline__ bool mask_mod(int q, int k, const ForwardArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// A work tile: queries of one head of one batch.
struct WorkTile { int first_query, head, batch; };

// Returns the work tile of an index. `section` heads are scheduled together, so few that their K and V stay in the L2:
// the index counts sections, then query tiles, then the heads of a section. Later queries attend to more keys, so tiles
// are taken from last to first. Tiles are aligned to the last query, up to whole warpgroups, so that the work tiles
// with most keys are full. The first_query of the first tile may be negative: its warpgroups before query 0 compute
// nothing.
__device__ __forceinline__ WorkTile work_tile_at(int index, const ForwardArguments& arguments) {
  const int section_tiles = arguments.section * arguments.tiles_q;
  const int first_head = index / section_tiles * arguments.section, rest = index % section_tiles;
  const int heads = min(arguments.section, arguments.heads - first_head);
  const int tile = arguments.tiles_q - 1 - rest / heads;
  const int first_query = tile * kTileQ - (arguments.tiles_q * kTileQ - arguments.len_q) / kPartQ * kPartQ;
  const int head = first_head + rest % heads;   // among the heads of all batches
  return {first_query, head % arguments.heads_q, head / arguments.heads_q};
}

// The key tiles to visit for a query tile. The mainloop takes a step for each. Those from full_begin to full_end need
// no mask. begin, full_begin and full_end are indices of tiles; count is a number of tiles.
struct KeyTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_key(int step) const { return (begin + step) * kTileK; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

// Returns the key tiles of a work tile.
__device__ __forceinline__ KeyTiles key_tiles_of(const WorkTile& work, const ForwardArguments& arguments) {
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

// ---- The producer ---------------------------------------------------------------------------------------------------

// The producer: loads Q of each work tile, and K and V of each step, K one step ahead, into stages that are empty.
__device__ __forceinline__ void producer(const SharedStorage& storage, const ForwardArguments& arguments) {
  int index = blockIdx.x;   // of the CTA's first work tile; then the next one that no other CTA has taken
  PipelineState<kStages> first_state = {0};   // of the first step of the work tile
  unsigned queries_empty_phase = 1;   // of the previous work tile; 1 passes at once on a new barrier
  for (; index < arguments.tiles; queries_empty_phase ^= 1) {
    const WorkTile work = work_tile_at(index, arguments);
    const KeyTiles tiles = key_tiles_of(work, arguments);
    // The KV head: head / heads_per_kv = umulhi(2 * head + 1, ceil(2^31 / heads_per_kv)), which is exact for head <
    // 2^16 and heads_per_kv <= 2^13. The + 1 tolerates a reciprocal that is rounded in either direction.
    const int head_kv = __umulhi(2 * work.head + 1, arguments.kv_reciprocal);
    const auto load_keys = [&](int step) {
      const PipelineState<kStages> state = first_state + step;
      PipelineState<kKeyStages> part = key_part_of(state);
#pragma unroll 1
      for (int column = 0; column < kHeadDimPadded; column += kKeyColumns, ++part) {
        load_columns<kHeadPanel>(storage.keys(part.stage()), arguments.k_map,
            storage.keys_empty(part.stage()), storage.keys_full(part.stage()), part.phase(), column,
            column + kKeyColumns, tiles.first_key(step), head_kv, work.batch);
      }
    };
    const auto load_values = [&](int step) {
      const PipelineState<kStages> state = first_state + step;
      for (int half = 0; half < 2; ++half) {
        const PipelineState<kValueStages> part = value_half_of(state, half);
        load_columns<kValuePanel>(storage.values(part.stage()), arguments.v_map,
            storage.values_empty(part.stage()), storage.values_full(part.stage()), part.phase(), half * kOutputColumns,
            (half + 1) * kOutputColumns, tiles.first_key(step), head_kv, work.batch);
      }
    };

    if (tiles.count > 0) load_keys(0);
    mbarrier_wait(storage.queries_empty(), queries_empty_phase);
    storage.tile_index() = index;
    mbarrier_arrive_expect_bytes(storage.queries_full(), tiles.count > 0 ? kRowGroups * kWarpgroupQueryBytes : 0);
    for (int group = 0; group < kRowGroups && tiles.count > 0; ++group) {
      load_rows<64, kHeadDimPadded, kHeadPanel>(storage.queries(group), arguments.q_map, storage.queries_full(),
                                                work.first_query + group * kPartQ, work.head, work.batch);
    }
#pragma unroll 1   // the producer waits for barriers most of the time
    for (int step = 1; step < tiles.count; ++step) {
      load_keys(step);
      load_values(step - 1);
    }
    if (tiles.count > 0) load_values(tiles.count - 1);
    first_state = first_state + tiles.count;
    // A launch increments the counter once after each tile: the last increment wraps it to 0, as it began.
    index = arguments.next_tile == nullptr ? arguments.tiles
                                           : gridDim.x + atomicInc(arguments.next_tile, arguments.tiles - 1);
  }
  mbarrier_wait(storage.queries_empty(), queries_empty_phase);
  storage.tile_index() = index;   // not a tile: the consumers are done
  mbarrier_arrive(storage.queries_full());
}

// ---- The consumers --------------------------------------------------------------------------------------------------

// Applies the mask: sets the scores of masked-out keys to -inf.
__device__ __forceinline__ void apply_mask(float (&scores)[Scores::kElements], const Position& position, int first_key,
                                           const ForwardArguments& arguments) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    const int q = position.query + Scores::row(n), k = first_key + position.key + Scores::column(n);
    scores[n] = mask_mod(q, k, arguments) ? scores[n] : minus_infinity();
  }
}

// Sets the scores of keys beyond the last one to -inf: the tile has `keys_left` keys. Only the last tile of a sequence
// may have such keys, so they are not a part of the mask.
__device__ __forceinline__ void apply_seqlen_mask(float (&scores)[Scores::kElements], const Position& position, int keys_left) {
#pragma unroll
  for (int n = 0; n < Scores::kElements; ++n) {
    if (Scores::column(n) >= keys_left - position.key) scores[n] = minus_infinity();
  }
}

// Turns a tile of Q * K^T into scores: applies the mask, and masks keys beyond the last one.
__device__ __forceinline__ void apply_mods(float (&scores)[Scores::kElements], const Position& position,
                                           const KeyTiles& tiles, int step, int first_key, const ForwardArguments& arguments) {
  if (!tiles.full(step)) apply_mask(scores, position, first_key, arguments);
  if (const int keys_left = arguments.len_k - first_key; keys_left < kTileK) apply_seqlen_mask(scores, position, keys_left);
}

// The epilogue: divides by the row sums, stores this warp's 16 rows of the output and, to the base e, the log-sum-exp
// of this lane's two rows. A row that attends to no key is 0, whatever V holds, and its log-sum-exp is -inf. The
// warpgroup has the kOutputColumns columns of the output from first_column on. The first one stores the log-sum-exp.
__device__ __forceinline__ void epilogue(float (&output)[kOutputColumns / 2], RowState (&rows)[2], unsigned tile,
                                         const Position& position, int first_column, const ForwardArguments& arguments) {
  float normalise[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r].sum = quad_sum(rows[r].sum);
    if (rows[r].sum == 0.0f) {
#pragma unroll
      for (int n = 2 * r; n < kOutputColumns / 2; n += 4) output[n] = output[n + 1] = 0.0f;
    }
    normalise[r] = rows[r].sum == 0.0f ? 0.0f : 1.0f / rows[r].sum;
  }
  rescale(output, normalise);
  store_rows(output, tile, arguments.o_map, position.query >= 0, position.query, position.head, position.batch, first_column);
  if (first_column > 0 || arguments.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = position.query + Output::row_offset(r);
    const long long head = static_cast<long long>(position.batch) * arguments.heads_q + position.head;
    if (query < 0 || query >= arguments.len_q) continue;
    const float log2_sum = rows[r].row_max * kScoreToLog2 + log2_approx(rows[r].sum);
    arguments.lse[head * arguments.len_q + query] = rows[r].sum == 0.0f ? minus_infinity() : log2_sum * 0.69314718f;
  }
}

// The first consumer warpgroup: computes the scores of 64 rows, and the first columns of their output. Q * K^T of the
// next step and P * V of this one run on the tensor cores beside the softmax and P * V of the other warpgroup, to which
// it passes P.
__device__ __forceinline__ void score_consumer(const SharedStorage& storage, const ForwardArguments& arguments) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const unsigned queries = storage.queries(0);
  PipelineState<kStages> state = {0};   // of K and V, through all work tiles
  PipelineState<kPassedStages> passed = {0};   // of P, and of the row states of each work tile
  for (unsigned queries_phase = 0;; queries_phase ^= 1) {
    mbarrier_wait(storage.queries_full(), queries_phase);
    const int index = __shfl_sync(0xffffffffu, storage.tile_index(), 0);   // uniform: a warp has one index
    if (index >= arguments.tiles) break;
    const WorkTile work = work_tile_at(index, arguments);
    const KeyTiles tiles = key_tiles_of(work, arguments);
    const int first = 0, last = tiles.count;   // steps
    const Position position = {work.batch, work.head, work.first_query + warp_row + lane / 4, lane % 4 * 2};
    float output[kOutputColumns / 2] = {}, scores[kTileK / 2];
    unsigned probabilities[kTileK / 16][4];
    RowState rows[Scores::kRows];
    float rescale_factor[Scores::kRows];

    if (first < last) {
      issue_qk_wgmma(scores, queries, storage, key_part_of(state));
      release_keys<0>(storage, key_part_of(state));
      await_product<0>(scores);
      apply_mods(scores, position, tiles, first, tiles.first_key(first), arguments);
      online_softmax(scores, rows, rescale_factor);
      round_probabilities(probabilities, scores);
      pass_probabilities(probabilities, make_float2(1.0f, 1.0f), storage, passed++);
      for (int step = first + 1; step < last; ++step, ++state) {
        issue_qk_wgmma(scores, queries, storage, key_part_of(state + 1));
        const PipelineState<kValueStages> values = value_half_of(state, 0);
        mbarrier_wait(storage.values_full(values.stage()), values.phase());
        issue_pv_wgmma(output, probabilities, storage.values(values.stage()));
        release_keys<1>(storage, key_part_of(state + 1));
        await_product<1>(scores);
        apply_mods(scores, position, tiles, step, tiles.first_key(step), arguments);
        const bool outgrown = online_softmax(scores, rows, rescale_factor);
        await_product<0>(output);
        release(storage.values_empty(values.stage()));
        if (outgrown) rescale(output, rescale_factor);
        round_probabilities(probabilities, scores);
        const float2 passed_factors = outgrown ? make_float2(rescale_factor[0], rescale_factor[1]) : make_float2(1.0f, 1.0f);
        pass_probabilities(probabilities, passed_factors, storage, passed++);
      }
      const PipelineState<kValueStages> values = value_half_of(state, 0);
      mbarrier_wait(storage.values_full(values.stage()), values.phase());
      issue_pv_wgmma(output, probabilities, storage.values(values.stage()));
      await_product<0>(output);
      ++state;
      release(storage.values_empty(values.stage()));
    }
    pass_rows(rows, storage, passed++);
    // The output overwrites the queries of the warpgroup, which none of its warps may still be reading.
    named_barrier_sync(1, 128);
    epilogue(output, rows, storage.output(0), position, 0, arguments);
    release(storage.queries_empty());
  }
}

// The second consumer warpgroup: computes the last columns of the output of 64 rows, from P of the first one.
__device__ __forceinline__ void value_consumer(const SharedStorage& storage, const ForwardArguments& arguments) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  PipelineState<kStages> state = {0};          // of V, through all work tiles
  PipelineState<kPassedStages> passed = {0};   // of P, and of the row states of each work tile
  for (unsigned queries_phase = 0;; queries_phase ^= 1) {
    mbarrier_wait(storage.queries_full(), queries_phase);
    const int index = __shfl_sync(0xffffffffu, storage.tile_index(), 0);   // uniform: a warp has one index
    if (index >= arguments.tiles) break;
    const WorkTile work = work_tile_at(index, arguments);
    const int steps = key_tiles_of(work, arguments).count;
    const Position position = {work.batch, work.head, work.first_query + warp_row + lane / 4, lane % 4 * 2};
    float output[kOutputColumns / 2] = {};
    for (int step = 0; step < steps; ++step, ++state, ++passed) {
      mbarrier_wait(storage.passed_full(passed.stage()), passed.phase());
      const float2 factors = storage.pointer<float2>(storage.factors(passed.stage()))[threadIdx.x % 128];
      if (__any_sync(0xffffffffu, factors.x != 1.0f || factors.y != 1.0f)) rescale(output, {factors.x, factors.y});
      const PipelineState<kValueStages> values = value_half_of(state, 1);
      mbarrier_wait(storage.values_full(values.stage()), values.phase());
      issue_passed_pv_wgmma(output, storage.probabilities(passed.stage()), storage.values(values.stage()));
      await_product<0>(output);
      release(storage.values_empty(values.stage()));
      release(storage.passed_empty(passed.stage()));
    }
    mbarrier_wait(storage.passed_full(passed.stage()), passed.phase());
    const float4 states = storage.pointer<float4>(storage.probabilities(passed.stage()))[threadIdx.x % 128];
    __syncwarp();   // all lanes have read them
    release(storage.passed_empty(passed++.stage()));
    RowState rows[Scores::kRows];
    rows[0].row_max = states.x, rows[0].sum = states.y;
    rows[1].row_max = states.z, rows[1].sum = states.w;
    epilogue(output, rows, storage.output(0) + kOutputColumns * 64 * kElementBytes, position, kOutputColumns, arguments);
    release(storage.queries_empty());
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_forward_bf16_d512_causal_f8fefaed(const __grid_constant__ ForwardArguments arguments) {
  const unsigned shared = shared_address(shared_memory);
  const SharedStorage storage = {shared, shared + kBarrierOffset};
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);   // uniform: a warp has one value
  if (warpgroup == kConsumers) {
    registers_decrease<24>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) producer(storage, arguments);
  } else {
    registers_increase<240>();
    if (warpgroup == 0) score_consumer(storage, arguments);
    else value_consumer(storage, arguments);
  }
}
