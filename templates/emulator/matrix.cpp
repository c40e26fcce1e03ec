// ldmatrix, stmatrix and mma. Fragment layouts are PTX's: g = lane / 4 is a fragment's row, t = lane % 4 its pair of
// columns.
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
    const u16* rows[8];  // lane 8 * matrix + i brought the address of row i
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
};

static void store_matrix_action(void* const* lanes, u32) {
  int count = static_cast<StoredRow*>(lanes[0])->count;
  for (int matrix = 0; matrix < count; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {  // lane 8 * matrix + i brought the address of row i
      u16* row = static_cast<StoredRow*>(lanes[8 * matrix + lane / 4])->row;
      u32 pair = static_cast<StoredRow*>(lanes[lane])->fragment[matrix];
      row[lane % 4 * 2] = u16(pair);
      row[lane % 4 * 2 + 1] = u16(pair >> 16);
    }
  }
}

void store_matrix(u32 shared_destination, const u32* fragment, int count, Site site) {
  Thread& self = running_thread();
  StoredRow row{fragment, nullptr, count};
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

template <Element element>
static float to_float(u32 bits) {
  return element == Element::kf16 ? float_from_f16(u16(bits)) : float_from_bf16(u16(bits));
}

// d(16 x 8) += a(16 x 16) * b(16 x 8)
template <Element element>
static void multiply_action(void* const* lanes, u32) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Operands& in = *static_cast<Operands*>(lanes[lane]);
    int g = lane / 4, t = lane % 4 * 2;
    for (int part = 0; part < 8; ++part) {  // a: rows g, g + 8, then columns + 8
      int word = part / 2, half = part % 2;
      a[g + word % 2 * 8][t + word / 2 * 8 + half] = to_float<element>(in.a[word] >> (16 * half));
    }
    for (int part = 0; part < 4; ++part)
      b[t + part / 2 * 8 + part % 2][g] = to_float<element>(in.b[part / 2] >> (part % 2 * 16));
    for (int part = 0; part < 4; ++part) d[g + part / 2 * 8][t + part % 2] = in.d[part];
  }
  int depth = static_cast<Operands*>(lanes[0])->depth;
  for (int row = 0; row < 16; ++row) {
    for (int begin = 0; begin < 16; begin += depth) {
      float sum[8] = {};
      for (int k = begin; k < begin + depth; ++k)
        for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
      for (int column = 0; column < 8; ++column) d[row][column] += sum[column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* out = static_cast<Operands*>(lanes[lane])->d;
    int g = lane / 4, t = lane % 4 * 2;
    for (int part = 0; part < 4; ++part) out[part] = d[g + part / 2 * 8][t + part % 2];
  }
}

void multiply_accumulate(float* d, const u32* a, u32 b0, u32 b1, Element element, int depth, Site site) {
  Operands operands{d, a, {b0, b1}, depth};
  WarpAction action = element == Element::kf16 ? multiply_action<Element::kf16> : multiply_action<Element::kbf16>;
  warp_collective(kFullWarp, WarpOperation::kMultiply, &operands, action, site);
}

}  // namespace emulator
