// flashgen: attention forward, bf16-d128-causal-softcap30-f455bdba
//
// mask     causal()
// score    softcap(30); scale 0.0883883476
// dropout  0
// dims     head 128, value 128; bfloat16, accumulated in float32; heads_q a multiple of heads_kv
// target   sm_90a, family hopper
// plan     192 queries x 80 keys, 3 warpgroup(s) of 160 registers, 2 stage(s) of K and V, 180312 bytes of shared memory
// method   online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): reference is the paper's m, which may lag; sum is its l
//          a warpgroup loads; the others overlap products with softmax (Shah et al. 2024, algorithm 2)
// FLOPs    512 * batch * heads_q * len_q * len_k * (share of tiles visited)
// HBM      2 * batch * (heads_q * len_q * 256 + heads_kv * len_k * 256) bytes, at least; + 4 * batch * heads_q * len_q for the LSE
//
// Grid: one block per multiprocessor; each takes tiles of queries until none is left. Made by
//   flashgen show --target sm_90a '{"dropout":0.0,"dtype":"bfloat16","head_dim":128,"layout":"bhsd","mask":{"expression":["LessEqual","k",["Add","q",["Sub","len_k","len_q"]]],"name":"causal()"},"scale":0.08838834764831843,"score":{"expression":["Mul",{"float":"0x1.e000000000000p+4"},["FastTanh",["Divide","score",{"float":"0x1.e000000000000p+4"}]]],"name":"softcap(30)"},"value_dim":128,"version":1}'

using Element = unsigned short;   // the bits of a bfloat16

struct alignas(64) TensorMap {   // a CUtensorMap: what the copy engine knows of an array
  unsigned long long words[16];
};

struct ForwardArguments {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap o_map;
  float* lse;   // (batch, heads_q, len_q), or null
  unsigned* next_tile;   // 0, before and after; null: no tiles beside each block's first
  int tiles;   // of queries, of all heads and batches
  int tiles_q;   // of each head
  int heads;   // of queries, of all batches
  int section;   // heads that take turns with their tiles
  int heads_q;
  int len_q;
  int len_k;
  unsigned kv_reciprocal;   // 2^31 / heads per head of K and V, rounded up
};

// ---- The plan -------------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kValueDim = 128;
constexpr int kHeadDimPadded = 128;   // a multiple of the depth of a wgmma; zeros beyond kHeadDim
constexpr int kValueDimPadded = 128;
constexpr int kConsumers = 3;   // warpgroups that compute, 64 rows each; one more loads
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPartQ = 64;   // queries of a warpgroup, each a row
constexpr int kTileQ = kConsumers * kPartQ;
constexpr int kTileK = 80;   // keys of a step
constexpr int kStages = 2;   // tiles of K, and of V, that shared memory holds at once
constexpr float kScale = 0.0883883461f;
constexpr float kScoreToLog2 = 1.44269504f;   // log2(e): probabilities are powers of 2
constexpr float kMostLag = 8.0f;   // in log2: of a row's reference behind its maximum
constexpr float kMostReference = 11629080.0f;   // whose product with kScoreToLog2 is less than 2^24

// A tile is panels of columns side by side, as wide as TMA swizzles them: 16-byte chunks of a row exchanged within a panel.
constexpr int kHeadPanel = 64;    // columns of Q and K
constexpr int kValuePanel = 64;   // columns of V and the output
constexpr int kElementBytes = sizeof(Element);

// Shared memory of a block, 180312 bytes, by offset:
//        0  rows of warpgroups (Q, O), 3 x 32768 bytes
//    98304  K, 2 x 20480 bytes
//   139264  V, 2 x 20480 bytes
//   180224  mbarriers, 80 bytes
//   180304  tile number, 8 bytes
constexpr int kQueryBytes = 64 * kHeadDimPadded * kElementBytes;
constexpr int kOutputBytes = 64 * kValueDimPadded * kElementBytes;
constexpr int kRowsBytes = kQueryBytes + kOutputBytes;
constexpr int kKeyBytes = kTileK * kHeadDimPadded * kElementBytes;
constexpr int kValueBytes = kTileK * kValueDimPadded * kElementBytes;
constexpr int kBarrierBytes = (2 + 4 * kStages) * 8;
constexpr int kIndexBytes = 8;
constexpr int kKeyOffset = kConsumers * kRowsBytes;
constexpr int kValueOffset = (kKeyOffset + kStages * kKeyBytes + 1023) / 1024 * 1024;
constexpr int kBarrierOffset = kValueOffset + kStages * kValueBytes;
constexpr int kIndexOffset = kBarrierOffset + kBarrierBytes;
static_assert(kIndexOffset + kIndexBytes <= 180312, "the shared memory of the launch");
static_assert(kTileK % 16 == 0 && kTileK <= 256 && kValueDimPadded <= 256, "what one wgmma and one copy take");

// ---- Primitives -----------------------------------------------------------------------------------------------------

#ifndef FLASHGEN_EMULATOR   // the emulator brings its own

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Closes the group of stores from shared memory that this thread has started since the last commit.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups of stores have still to read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
}

// True in one lane of the warp.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
  return elected;
}

// 2 to the power of x, by the special-function unit.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Shows what this thread has written to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The logarithm of x to base 2, by the special-function unit.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Announces bytes that copies will bring to the barrier's current phase, and arrives.
__device__ __forceinline__ void mbarrier_expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Makes the 8 bytes at `barrier` a barrier whose phases end after this many arrivals, and the bytes announced to it.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Shows initialised barriers to the copy engine; other threads see them after a __syncthreads.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits until the barrier's phase of this parity has ended: 0 for its first, third, ...; a new barrier counts as past
// a phase of parity 1.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile("{\n\t.reg .pred done;\n"
               "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
               "@!done bra again;\n\t}" :: "r"(barrier), "r"(parity) : "memory");
}

// Keeps the compiler from moving uses of these registers, which wgmmas work on unseen, across this point.
template <int kCount>
__device__ __forceinline__ void order_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i]) :: "memory");
}

// Two floats, rounded to nearest even, as one register: `low` in the lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Gives up this warpgroup's registers beyond kRegisters a thread.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

// Takes registers for each thread of this warpgroup, up to kRegisters, as soon as others have given them up.
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

// The 32-bit address of `pointer` in the shared-memory window.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// stmatrix: four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(unsigned destination, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
               :: "r"(destination), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// The hyperbolic tangent of x, by the special-function unit (sm_75 and later; absolute error below 2^-10).
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Starts copying the box of the map at coordinates (c0, ...) to shared memory, zeros where it leaves the tensor; its
// bytes arrive at the barrier.
__device__ __forceinline__ void tma_load_4d(unsigned destination, const TensorMap& map, unsigned barrier, int c0, int c1,
                                            int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, { %3, %4, %5, %6}], [%2];"
               :: "r"(destination), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Starts copying a box from shared memory to coordinates (c0, ...) of the map's tensor, clipped at its ends.
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, unsigned source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Closes the group of wgmmas started since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Orders this warpgroup's uses of registers before the wgmmas that follow, which read or accumulate in them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// d (64 x kN, fp32) = a (64 x 16) * b (16 x kN), plus d where `accumulate`; a in registers, as of mma.m16n8k16, b a
// described tile of shared memory, its rows along the depth where kTransposedB. Asynchronous.
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

// Waits until at most kPending of this warpgroup's groups of wgmmas are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
}

// d (64 x kN, fp32) = a (64 x 16) * b (16 x kN), plus d where `accumulate`; a and b are described tiles of shared memory,
// b's rows along the depth where kTransposedB. Asynchronous: d is whole after wgmma_wait.
template <int kN, bool kTransposedB>
__device__ __forceinline__ void wgmma_shared_bf16(float (&d)[kN / 2], unsigned long long a, unsigned long long b,
                                                  bool accumulate);
template <>
__device__ __forceinline__ void wgmma_shared_bf16<80, false>(
    float (&d)[40], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %42, 0;\n\t"
               "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
               " %0, %1, %2, %3, %4, %5, %6, %7, "
               " %8, %9, %10, %11, %12, %13, %14, %15, "
               " %16, %17, %18, %19, %20, %21, %22, %23, "
               " %24, %25, %26, %27, %28, %29, %30, %31, "
               " %32, %33, %34, %35, %36, %37, %38, %39"
               "}, %40, %41, p, 1, 1, 0, 0;\n\t}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

#endif

// What wgmma is told of a tile in shared memory (PTX ISA, "matrix descriptor"): where it begins, how far apart are its
// panels (leading; unused where rows run along the depth) and its groups of 8 rows (stride), and how its 16-byte chunks are swizzled.
template <int kSwizzleBytes>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address, unsigned leading_bytes,
                                                                unsigned stride_bytes) {
  constexpr unsigned long long kMode = kSwizzleBytes == 128 ? 1 : kSwizzleBytes == 64 ? 2 : kSwizzleBytes == 32 ? 3 : 0;
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 | kMode << 62;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The maximum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The sum over the four lanes that hold one row of an mma accumulator.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The mbarriers of a block, by their addresses in shared memory. `use` numbers the uses of a pipeline's stages in turn.
struct Barriers {
  unsigned first;

  // Which tile Q is of: written before Q is loaded, read when it has landed.
  static __device__ __forceinline__ int& tile_index() { return *reinterpret_cast<int*>(shared_memory + kIndexOffset); }

  // Q of a tile has landed; every consumer warp has released it.
  __device__ __forceinline__ unsigned queries_full() const { return first; }
  __device__ __forceinline__ unsigned queries_empty() const { return first + 8; }

  // A stage of K has landed, and every consumer warp has released it; the same of V.
  __device__ __forceinline__ unsigned keys_full(int use) const { return first + 16 + use % kStages * 32; }
  __device__ __forceinline__ unsigned keys_empty(int use) const { return first + 24 + use % kStages * 32; }
  __device__ __forceinline__ unsigned values_full(int use) const { return first + 32 + use % kStages * 32; }
  __device__ __forceinline__ unsigned values_empty(int use) const { return first + 40 + use % kStages * 32; }
  static __device__ __forceinline__ unsigned parity(int use) { return use / kStages & 1; }

  __device__ __forceinline__ void init() const {
    mbarrier_init(queries_full(), 1);
    mbarrier_init(queries_empty(), kConsumers * 4);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(keys_full(stage), 1);
      mbarrier_init(keys_empty(stage), kConsumers * 4);
      mbarrier_init(values_full(stage), 1);
      mbarrier_init(values_empty(stage), kConsumers * 4);
    }
    mbarrier_fence_init();
  }
};

// One lane of each warp says that the warp is done with something.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// A step that concerns other warpgroups only.
__device__ __forceinline__ void pass_by(int use, const Barriers& barriers) {
  mbarrier_wait(barriers.keys_full(use), barriers.parity(use));
  __syncwarp();   // else a lane might miss this use
  release(barriers.keys_empty(use));
  mbarrier_wait(barriers.values_full(use), barriers.parity(use));
  __syncwarp();
  release(barriers.values_empty(use));
}

// Where a stage's tiles begin in shared memory.
__device__ __forceinline__ unsigned keys_at(unsigned shared, int use) {
  return shared + kKeyOffset + use % kStages * kKeyBytes;
}

__device__ __forceinline__ unsigned values_at(unsigned shared, int use) {
  return shared + kValueOffset + use % kStages * kValueBytes;
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

// The same of a stage, kTileK rows, as soon as it is empty.
template <int kColumns, int kPanel>
__device__ __forceinline__ void load_stage(unsigned tile, const TensorMap& map, unsigned empty, unsigned full, int use,
                                           int first_key, int head, int batch) {
  mbarrier_wait(empty, Barriers::parity(use) ^ 1);
  mbarrier_expect_bytes(full, kTileK * kColumns * kElementBytes);
  load_rows<kTileK, kColumns, kPanel>(tile, map, full, first_key, head, batch);
}

// Rounds a warp's 16 rows of the output and stores them if they `exist`, by way of shared memory, where a panel of
// columns holds the warpgroup's 64 rows, swizzled as TMA does it. Rows beyond the last query are clipped.
__device__ __forceinline__ void store_rows(const float (&output)[kValueDimPadded / 2], unsigned tile,
                                           const TensorMap& map, bool exist, int query, int head, int batch) {
  constexpr int kChunks = kValuePanel / 8;   // 16-byte chunks of a panel's row
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;   // of the warpgroup's
  const int row = warp_row + lane % 16, swizzle = row / (8 / kChunks) % kChunks;
#pragma unroll
  for (int n = 0; n < kValueDimPadded / 2; n += 8) {
    const int panel = n / 4 / kChunks, chunk = (n / 4 % kChunks + lane / 16) ^ swizzle;
    store_matrix_x4(tile + ((panel * 64 + row) * kChunks + chunk) * 16, pack_bf16(output[n], output[n + 1]),
                    pack_bf16(output[n + 2], output[n + 3]), pack_bf16(output[n + 4], output[n + 5]),
                    pack_bf16(output[n + 6], output[n + 7]));
  }
  fence_async_shared();
  __syncwarp();
  if (lane == 0 && exist) {
#pragma unroll
    for (int column = 0; column < kValueDimPadded; column += kValuePanel) {
      const unsigned source = tile + (column * 64 + warp_row * kValuePanel) * kElementBytes;
      tma_store_4d(map, source, column, query, head, batch);
    }
    bulk_commit();
  }
}

// Starts scores = Q * K^T of a warpgroup's rows: `queries` and `keys` are where they begin in shared memory.
__device__ __forceinline__ void start_scores(float (&scores)[kTileK / 2], unsigned queries, unsigned keys) {
  constexpr int kSwizzle = kHeadPanel * kElementBytes;
  order_registers(scores);
  wgmma_fence();
  const unsigned long long a = matrix_descriptor<kSwizzle>(queries, 16, 8 * kSwizzle);
  const unsigned long long b = matrix_descriptor<kSwizzle>(keys, 16, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kHeadDimPadded; depth += 16) {
    const int panel = depth / kHeadPanel, column = depth % kHeadPanel;   // descriptors count in 16 bytes
    wgmma_shared_bf16<kTileK, false>(scores, a + (panel * 64 * kSwizzle + column * kElementBytes) / 16,
                                    b + (panel * kTileK * kSwizzle + column * kElementBytes) / 16, depth > 0);
  }
  wgmma_commit();
}

// Starts output += P * V; the rows of V, which begin at `values` in shared memory, run along the depth.
__device__ __forceinline__ void start_output(float (&output)[kValueDimPadded / 2],
                                             const unsigned (&probabilities)[kTileK / 16][4], unsigned values) {
  constexpr int kSwizzle = kValuePanel * kElementBytes;
  order_registers(output);
  wgmma_fence();
  const unsigned long long b = matrix_descriptor<kSwizzle>(values, kTileK * kSwizzle, 8 * kSwizzle);
#pragma unroll
  for (int depth = 0; depth < kTileK; depth += 16) {
    wgmma_registers_bf16<kValueDimPadded, true>(output, probabilities[depth / 16], b + depth * kSwizzle / 16, true);
  }
  wgmma_commit();
}

// Waits until the product has been computed, with at most kPending younger groups of wgmmas still running.
template <int kPending, int kCount>
__device__ __forceinline__ void await_product(float (&product)[kCount]) {
  wgmma_wait<kPending>();
  order_registers(product);
}

// Multiplies the output's rows.
__device__ __forceinline__ void rescale(float (&output)[kValueDimPadded / 2], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kValueDimPadded / 2; ++n) output[n] *= factor[n / 2 % 2];
}

// The largest score of row r, 0 or 1, of this lane's two.
__device__ __forceinline__ float row_maximum(const float (&scores)[kTileK / 2], int r) {
  float even = scores[2 * r], odd = scores[2 * r + 1];   // two chains of operations, half as long
#pragma unroll
  for (int n = 2 * r + 4; n < kTileK / 2; n += 4) {
    even = fmaxf(even, scores[n]);
    odd = fmaxf(odd, scores[n + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

// A row's running state: the reference that its probabilities are relative to, and this lane's share of their sum.
struct RowState {
  float reference = minus_infinity(), sum = 0.0f;

  // Of a score's power of 2: of use where it is rounded by less than 1, and not infinite as in a row that has seen no
  // key yet.
  __device__ __forceinline__ float offset() const { return -reference * kScoreToLog2; }
  __device__ __forceinline__ bool has_offset() const { return fabsf(reference) < kMostReference; }

  // Raises the reference: by what factor sum and output shrink. A row that has seen no key yet has nothing to rescale;
  // -inf - -inf would be NaN.
  __device__ __forceinline__ float raise_to(float maximum) {
    const float old = reference;
    reference = fmaxf(old, maximum);
    const float shrink = reference == minus_infinity() ? 1.0f : exp2_approx((old - reference) * kScoreToLog2);
    sum *= shrink;
    return shrink;
  }
};

// Takes the references from the scores themselves, where rows have no offsets: exact, but one operation more for each.
__device__ __forceinline__ void subtract_references(float (&scores)[kTileK / 2], const RowState (&rows)[2]) {
#pragma unroll
  for (int n = 0; n < kTileK / 2; ++n) {
    const float reference = rows[n / 2 % 2].reference;
    scores[n] -= reference == minus_infinity() ? 0.0f : reference;
  }
}

// Rounds probabilities to the input's type: the operand of P * V, 16 keys at a time.
__device__ __forceinline__ void round_probabilities(unsigned (&operand)[kTileK / 16][4],
                                                    const float (&probabilities)[kTileK / 2]) {
#pragma unroll
  for (int n = 0; n < kTileK / 2; n += 2) {
    operand[n / 8][n / 2 % 4] = pack_bf16(probabilities[n], probabilities[n + 1]);
  }
}

// ---- The variant ----------------------------------------------------------------------------------------------------

// Where a score stands: batch, query head, this lane's first query and its first key within a tile.
struct Position {
  int batch, head, query, key;
};

// Score function: softcap(30), with the scale folded into its constants
__device__ __forceinline__ float modify_score(float product, const ForwardArguments& arguments) {
  return 30.0f * tanh_approx(product * (kScale / 30.0f));
}

// Mask: causal()
__device__ __forceinline__ bool may_attend(int q, int k, const ForwardArguments& arguments) {
  return k <= q + (arguments.len_k - arguments.len_q);
}

// Queries of one head of one batch: a tile, or the part of a warpgroup.
struct Work { int first_query, head, batch, queries; };

// The index-th tile. The heads of a section, whose K and V share the L2, take turns with their tiles; then comes the next
// section. Later queries see more keys: their tiles go first, and are whole. The first may begin before the first query,
// by whole warpgroups.
__device__ __forceinline__ Work work_of(int index, const ForwardArguments& arguments) {
  const int section_tiles = arguments.section * arguments.tiles_q;
  const int first_head = index / section_tiles * arguments.section, rest = index % section_tiles;
  const int heads = min(arguments.section, arguments.heads - first_head);
  const int tile = arguments.tiles_q - 1 - rest / heads;
  const int first_query = tile * kTileQ - (arguments.tiles_q * kTileQ - arguments.len_q) / kPartQ * kPartQ;
  const int head = first_head + rest % heads;   // of all batches
  return {first_query, head % arguments.heads_q, head / arguments.heads_q, kTileQ};
}

// The tiles of keys that a tile of queries attends to: one run, and a stretch of it in which every score counts.
struct KeyTiles {
  int begin, count, full_begin, full_end;

  __device__ __forceinline__ int first_key(int step) const { return (begin + step) * kTileK; }
  __device__ __forceinline__ bool full(int step) const { return begin + step >= full_begin && begin + step < full_end; }
};

__device__ __forceinline__ KeyTiles key_tiles_of(const Work& work, const ForwardArguments& arguments) {
  const int q_first = max(work.first_query, 0);
  const int q_last = min(work.first_query + work.queries, arguments.len_q) - 1;
  // In keys, the ends not included.
  const int begin = 0;
  const int end = min(arguments.len_k, q_last + arguments.len_k - arguments.len_q + 1);
  const int full_begin = 0;
  const int full_end = min(arguments.len_k, q_first + arguments.len_k - arguments.len_q + 1);
  const int first_tile = begin / kTileK;
  const int count = end > begin ? (end + kTileK - 1) / kTileK - first_tile : 0;
  return {first_tile, count, (full_begin + kTileK - 1) / kTileK, full_end / kTileK};
}

// ---- The warpgroup that loads ---------------------------------------------------------------------------------------

// What the loading thread does: for each tile Q, and K and V of each step, K one step ahead, as soon as there is room.
// The block's first tile is its own; then it takes the next that no other block has taken.
__device__ __forceinline__ void load_tiles(unsigned shared, const Barriers& barriers, const ForwardArguments& arguments) {
  int index = blockIdx.x, used = 0;   // stages, by the tiles before
  unsigned queries_used = 1;          // parity of the use of Q before this one
  for (; index < arguments.tiles; queries_used ^= 1) {
    const Work work = work_of(index, arguments);
    const KeyTiles tiles = key_tiles_of(work, arguments);
    // The head of K and V, work.head / heads_per_kv, by a product with 2^31 / heads_per_kv, rounded up.
    const int head_kv = __umulhi(2 * work.head + 1, arguments.kv_reciprocal);
    const auto load_keys = [&](int step) {
      const int use = used + step;
      load_stage<kHeadDimPadded, kHeadPanel>(keys_at(shared, use), arguments.k_map, barriers.keys_empty(use),
                                             barriers.keys_full(use), use, tiles.first_key(step), head_kv, work.batch);
    };
    const auto load_values = [&](int step) {
      const int use = used + step;
      load_stage<kValueDimPadded, kValuePanel>(values_at(shared, use), arguments.v_map, barriers.values_empty(use),
                                               barriers.values_full(use), use, tiles.first_key(step), head_kv, work.batch);
    };

    if (tiles.count > 0) load_keys(0);
    mbarrier_wait(barriers.queries_empty(), queries_used);
    barriers.tile_index() = index;
    mbarrier_expect_bytes(barriers.queries_full(), tiles.count > 0 ? kConsumers * kQueryBytes : 0);
    for (int group = 0; group < kConsumers && tiles.count > 0; ++group) {
      load_rows<64, kHeadDimPadded, kHeadPanel>(shared + group * kRowsBytes, arguments.q_map, barriers.queries_full(),
                                                work.first_query + group * kPartQ, work.head, work.batch);
    }
    for (int step = 0; step < tiles.count; ++step) {
      if (step + 1 < tiles.count) load_keys(step + 1);
      load_values(step);
    }
    used += tiles.count;
    // A launch increments once after each tile: the last increment wraps the counter to the 0 that it began with.
    index = arguments.next_tile == nullptr ? arguments.tiles
                                           : gridDim.x + atomicInc(arguments.next_tile, arguments.tiles - 1);
  }
  mbarrier_wait(barriers.queries_empty(), queries_used);
  barriers.tile_index() = index;   // no tile: those that compute are done
  mbarrier_arrive(barriers.queries_full());
}

// ---- The steps of those that compute --------------------------------------------------------------------------------

// A lane holds scores and output as wgmma does: its n-th is of its row n / 2 % 2, which stand 8 apart, and of the tile's
// column n / 4 * 8 + n % 2 on from the lane's first.

// Products to scores, by the score function: -inf where the mask forbids a key, and beyond the last key. Most tiles are spared both.
__device__ __forceinline__ void finish_scores(float (&scores)[kTileK / 2], const Position& position,
                                              const KeyTiles& tiles, int step, const ForwardArguments& arguments) {
  const int first_key = tiles.first_key(step);
#pragma unroll
  for (int n = 0; n < kTileK / 2; ++n) {
    scores[n] = modify_score(scores[n], arguments);
  }
  if (!tiles.full(step)) {
#pragma unroll
    for (int n = 0; n < kTileK / 2; ++n) {
      const int q = position.query + n / 2 % 2 * 8, k = first_key + position.key + n / 4 * 8 + n % 2;
      scores[n] = may_attend(q, k, arguments) ? scores[n] : minus_infinity();
    }
  }
  const int left = arguments.len_k - first_key;
  if (left < kTileK) {
#pragma unroll
    for (int n = 0; n < kTileK / 2; ++n) {
      if (n / 4 * 8 + n % 2 >= left - position.key) scores[n] = minus_infinity();
    }
  }
}

// Turns a tile of scores into probabilities relative to the rows' references, and adds them to the rows' sums. References
// change only when some row of the warp has outgrown its own by 2^kMostLag: then the result is true, and the output must
// shrink by these factors. It runs beside P * V, as score functions take long, and their scores may grow from tile to tile.
__device__ __forceinline__ bool softmax(float (&scores)[kTileK / 2], RowState (&rows)[2], float (&shrink)[2]) {
  float maximum[2];
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    maximum[r] = row_maximum(scores, r);
    outgrown |= (maximum[r] - rows[r].reference) * kScoreToLog2 > kMostLag;
  }
  outgrown = __any_sync(0xffffffffu, outgrown);
  if (outgrown) {
#pragma unroll
    for (int r = 0; r < 2; ++r) shrink[r] = rows[r].raise_to(maximum[r]);
  }
  const bool by_offsets = __all_sync(0xffffffffu, rows[0].has_offset() && rows[1].has_offset());
  if (!by_offsets) subtract_references(scores, rows);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float offset = by_offsets ? rows[r].offset() : 0.0f;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int n = 2 * r; n < kTileK / 2; n += 4) {
      even += scores[n] = exp2_approx(fmaf(scores[n], kScoreToLog2, offset));
      odd += scores[n + 1] = exp2_approx(fmaf(scores[n + 1], kScoreToLog2, offset));
    }
    rows[r].sum += even + odd;
  }
  return outgrown;
}

// Divides by the row sums and stores this warp's 16 rows; and the log-sum-exp of this lane's two, to the base e. A row
// with nothing to attend to is 0, whatever V holds, and its log-sum-exp -inf.
__device__ __forceinline__ void write_rows(float (&output)[kValueDimPadded / 2], RowState (&rows)[2], unsigned tile,
                                           const Position& position, const ForwardArguments& arguments) {
  float normalise[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r].sum = quad_sum(rows[r].sum);
    if (rows[r].sum == 0.0f) {
#pragma unroll
      for (int n = 2 * r; n < kValueDimPadded / 2; n += 4) output[n] = output[n + 1] = 0.0f;
    }
    normalise[r] = rows[r].sum == 0.0f ? 0.0f : 1.0f / rows[r].sum;
  }
  rescale(output, normalise);
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();   // of the tile before
  __syncwarp();
  store_rows(output, tile, arguments.o_map, position.query >= 0, position.query, position.head, position.batch);
  if (arguments.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = position.query + r * 8;
    const long long head = static_cast<long long>(position.batch) * arguments.heads_q + position.head;
    if (query < 0 || query >= arguments.len_q) continue;
    const float log2_sum = rows[r].reference * kScoreToLog2 + log2_approx(rows[r].sum);
    arguments.lse[head * arguments.len_q + query] = rows[r].sum == 0.0f ? minus_infinity() : log2_sum * 0.69314718f;
  }
}

// The steps of a tile, first <= step < last, in which a warpgroup's own queries attend to keys; `tiles` learns in which
// of them every one of its scores counts.
struct Steps { int first, last; };

__device__ __forceinline__ Steps own_steps(KeyTiles& tiles, const Work& work, int warpgroup,
                                           const ForwardArguments& arguments) {
  const Work part = {work.first_query + warpgroup * kPartQ, work.head, work.batch, kPartQ};
  const KeyTiles own = key_tiles_of(part, arguments);
  tiles.full_begin = own.full_begin;
  tiles.full_end = own.full_end;
  const bool exists = part.first_query >= 0 && part.first_query < arguments.len_q;
  if (own.count == 0 || !exists) return {tiles.count, tiles.count};
  return {max(own.begin - tiles.begin, 0), min(own.begin - tiles.begin + own.count, tiles.count)};
}

// What a computing warpgroup does for its 64 rows of each tile. The scores of the next step and P * V of this one run on
// the tensor cores one after the other, beside the softmax of another warpgroup.
__device__ __forceinline__ void attend(int warpgroup, unsigned shared, const Barriers& barriers,
                                       const ForwardArguments& arguments) {
  const int lane = threadIdx.x % 32, warp_row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const unsigned queries = shared + warpgroup * kRowsBytes;
  int use = 0;   // of a stage, by this step
  for (unsigned queries_use = 0;; queries_use ^= 1) {   // parity of this use of Q
    mbarrier_wait(barriers.queries_full(), queries_use);
    const int index = __shfl_sync(0xffffffffu, barriers.tile_index(), 0);   // the same in a warp, as the compiler can see
    if (index >= arguments.tiles) break;
    const Work work = work_of(index, arguments);
    KeyTiles tiles = key_tiles_of(work, arguments);
    const auto [first, last] = own_steps(tiles, work, warpgroup, arguments);
    const Position position = {work.batch, work.head, work.first_query + warp_row + lane / 4, lane % 4 * 2};
    float output[kValueDimPadded / 2] = {}, scores[kTileK / 2];
    unsigned probabilities[kTileK / 16][4];
    RowState rows[2];
    float shrink[2];

    for (int step = 0; step < first; ++step) pass_by(use++, barriers);
    if (first < last) {
      mbarrier_wait(barriers.keys_full(use), barriers.parity(use));
      start_scores(scores, queries, keys_at(shared, use));
      await_product<0>(scores);
      release(barriers.keys_empty(use));
      if (first + 1 == last) release(barriers.queries_empty());
      finish_scores(scores, position, tiles, first, arguments);
      softmax(scores, rows, shrink);
      round_probabilities(probabilities, scores);
      for (int step = first + 1; step < last; ++step, ++use) {
        mbarrier_wait(barriers.keys_full(use + 1), barriers.parity(use + 1));
        start_scores(scores, queries, keys_at(shared, use + 1));
        mbarrier_wait(barriers.values_full(use), barriers.parity(use));
        start_output(output, probabilities, values_at(shared, use));
        await_product<1>(scores);
        release(barriers.keys_empty(use + 1));
        if (step + 1 == last) release(barriers.queries_empty());
        finish_scores(scores, position, tiles, step, arguments);
        const bool outgrown = softmax(scores, rows, shrink);
        await_product<0>(output);
        release(barriers.values_empty(use));
        if (outgrown) rescale(output, shrink);
        round_probabilities(probabilities, scores);
      }
      mbarrier_wait(barriers.values_full(use), barriers.parity(use));
      start_output(output, probabilities, values_at(shared, use));
      await_product<0>(output);
      release(barriers.values_empty(use++));
    } else {
      __syncwarp();   // the whole warp has seen this use of Q
      release(barriers.queries_empty());
    }
    for (int step = last; step < tiles.count; ++step) pass_by(use++, barriers);
    write_rows(output, rows, queries + kQueryBytes, position, arguments);
  }
  if (lane == 0) bulk_wait_read<0>();   // shared memory goes with the block
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_forward_bf16_d128_causal_softcap30_f455bdba(const __grid_constant__ ForwardArguments arguments) {
  const unsigned shared = shared_address(shared_memory);
  const Barriers barriers = {shared + kBarrierOffset};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);   // the same in a warp, as the compiler can see
  if (warpgroup == kConsumers) {
    registers_decrease<32>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) load_tiles(shared, barriers, arguments);
  } else {
    registers_increase<160>();
    attend(warpgroup, shared, barriers, arguments);
  }
}
