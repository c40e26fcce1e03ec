// ldmatrix, stmatrix and mma. Fragment layouts are those of PTX: g = lane / 4 is the row of a fragment, t = lane % 4
// its pair of columns.
#include "block.h"
#include "half_conversions.h"

namespace emulator {

constexpr u32 kFullWarp = 0xffffffffu;

struct MatrixRow {
  u32* fragment;
  const u16* row;
  int count;
  bool transposed;
};

static void load_matrix_action(void* const* lanes, u32) {
  const MatrixRow& any = *static_cast<MatrixRow*>(lanes[0]);
  for (int matrix = 0; matrix < any.count; ++matrix) {
    const u16* rows[8];  // lane 8 * matrix + i passes the address of row i
    for (int i = 0; i < 8; ++i) rows[i] = static_cast<MatrixRow*>(lanes[8 * matrix + i])->row;
    for (int lane = 0; lane < 32; ++lane) {
      int g = lane / 4, t = lane % 4 * 2;
      u32 low = any.transposed ? rows[t][g] : rows[g][t];
      u32 high = any.transposed ? rows[t + 1][g] : rows[g][t + 1];
      static_cast<MatrixRow*>(lanes[lane])->fragment[matrix] = low | high << 16;
    }
  }
}

void load_matrix(u32* fragment, int count, bool transposed, u32 shared_source, Site site) {
  MatrixRow row{fragment, nullptr, count, transposed};
  if (current->lane < u32(8 * count)) {
    row.row = static_cast<const u16*>(shared_pointer(shared_source, 16, 16, site));
    note_read(row.row, 16, __builtin_return_address(0));
    running_thread().block->async_proxy.check_generic(shared_source - kWindowBase, 16, false, "ldmatrix", site);
  }
  warp_collective(kFullWarp, WarpOperation::kLoadMatrix, &row, load_matrix_action, site);
}

struct StoredRow {
  const u32* fragment;
  u16* row;
  int count;
  bool transposed;
};

static void store_matrix_action(void* const* lanes, u32) {
  const StoredRow& any = *static_cast<StoredRow*>(lanes[0]);
  for (int matrix = 0; matrix < any.count; ++matrix) {
    u16* rows[8];  // lane 8 * matrix + i passes the address of row i
    for (int i = 0; i < 8; ++i) rows[i] = static_cast<StoredRow*>(lanes[8 * matrix + i])->row;
    for (int lane = 0; lane < 32; ++lane) {
      int g = lane / 4, t = lane % 4 * 2;
      u32 pair = static_cast<StoredRow*>(lanes[lane])->fragment[matrix];
      (any.transposed ? rows[t][g] : rows[g][t]) = u16(pair);
      (any.transposed ? rows[t + 1][g] : rows[g][t + 1]) = u16(pair >> 16);
    }
  }
}

void store_matrix(u32 shared_destination, const u32* fragment, int count, bool transposed, Site site) {
  Thread& self = running_thread();
  StoredRow row{fragment, nullptr, count, transposed};
  if (self.lane < u32(8 * count)) {
    row.row = static_cast<u16*>(shared_pointer(shared_destination, 16, 16, site));
    note_write(row.row, 16, __builtin_return_address(0));
    AsyncProxy& proxy = self.block->async_proxy;
    proxy.check_generic(shared_destination - kWindowBase, 16, true, "stmatrix", site);
    proxy.note_generic_write(shared_destination - kWindowBase, 16, self.warp);
  }
  warp_collective(kFullWarp, WarpOperation::kStoreMatrix, &row, store_matrix_action, site);
}

struct Operands {
  float* d;
  const u32* a;
  u32 b[2];
  int depth;
};

// A row of b or d. Its elements are multiplied and added one by one in ascending order.
typedef float Row __attribute__((vector_size(8 * sizeof(float))));

template <Element element, int count>
static void to_floats(float* values, const u16* bits) {
  for (int i = 0; i < count; ++i)
    values[i] = element == Element::kf16 ? float_from_f16(bits[i]) : float_from_bf16(bits[i]);
}

// d(16 x 8) += a(16 x 16) * b(16 x 8)
template <Element element>
static void multiply_action(void* const* lanes, u32) {
  u16 a_bits[16][16], b_bits[16][8];
  float a[16][16];
  Row b[16], d[16];
  for (int g = 0; g < 8; ++g) {
    for (int t = 0; t < 8; t += 2) {
      const Operands& in = *static_cast<Operands*>(lanes[4 * g + t / 2]);
      for (int word = 0; word < 4; ++word)  // a: rows g, g + 8, then columns + 8
        __builtin_memcpy(&a_bits[g + word % 2 * 8][t + word / 2 * 8], &in.a[word], sizeof(u32));
      for (int word = 0; word < 2; ++word) {
        b_bits[t + word * 8][g] = u16(in.b[word]);
        b_bits[t + word * 8 + 1][g] = u16(in.b[word] >> 16);
      }
      for (int part = 0; part < 4; ++part) d[g + part / 2 * 8][t + part % 2] = in.d[part];
    }
  }
  to_floats<element, 16 * 16>(&a[0][0], &a_bits[0][0]);
  to_floats<element, 16 * 8>(reinterpret_cast<float*>(b), &b_bits[0][0]);
  int depth = static_cast<Operands*>(lanes[0])->depth;
  for (int row = 0; row < 16; ++row) {
    for (int begin = 0; begin < 16; begin += depth) {
      Row sum = {};
      for (int k = begin; k < begin + depth; ++k) sum += a[row][k] * b[k];
      d[row] += sum;
    }
  }
  for (int g = 0; g < 8; ++g) {
    for (int t = 0; t < 8; t += 2) {
      float* out = static_cast<Operands*>(lanes[4 * g + t / 2])->d;
      for (int part = 0; part < 4; ++part) out[part] = d[g + part / 2 * 8][t + part % 2];
    }
  }
}

void multiply_accumulate(float* d, const u32* a, u32 b0, u32 b1, Element element, int depth, Site site) {
  Operands operands{d, a, {b0, b1}, depth};
  WarpAction action = element == Element::kf16 ? multiply_action<Element::kf16> : multiply_action<Element::kbf16>;
  warp_collective(kFullWarp, WarpOperation::kMultiply, &operands, action, site);
  record(Did::kMultiply, site, 0, 0, 1);
}

}  // namespace emulator
