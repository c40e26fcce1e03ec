// The arithmetic of one wgmma: products of 16-bit numbers summed over a depth of 16, then added to the accumulator.
#include "block.h"
#include "half_conversions.h"

namespace emulator {

static float element_value(Element element, u16 bits) {
  return element == Element::kf16 ? float_from_f16(bits) : float_from_bf16(bits);
}

void multiply_tiles(MatrixProduct& product, ProductWorkspace& workspace) {
  float(&b)[16][kMaxColumns] = workspace.b;
  const u32 columns = u32(product.what.columns);
  const Element element = product.what.element;
  for (u32 n = 0; n < columns; ++n)
    for (u32 k = 0; k < 16; ++k) b[k][n] = element_value(element, product.b[n][k]);
  for (u32 row = 0; row < 64; ++row) {
    float sums[kMaxColumns] = {};
    for (u32 k = 0; k < 16; ++k) {
      const float a = element_value(element, product.a[row][k]);
      for (u32 n = 0; n < columns; ++n) sums[n] += a * b[k][n];
    }
    float* d = product.accumulator->values.data() + row * columns;
    for (u32 n = 0; n < columns; ++n) d[n] = product.what.accumulate ? d[n] + sums[n] : sums[n];
  }
}

}  // namespace emulator
