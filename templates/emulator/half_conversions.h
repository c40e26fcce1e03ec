// float16 and bfloat16 patterns <-> float, rounding to nearest even, as cvt.rn does: NaN becomes 0x7fff.
#pragma once

namespace emulator {

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

inline u16 bf16_from_float(float value) {
  u32 bits = bit_cast<u32>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);  // a carry out of the mantissa raises the exponent
}

inline float float_from_bf16(u16 bits) { return bit_cast<float>(u32(bits) << 16); }

inline u16 f16_from_float(float value) {
  u32 bits = bit_cast<u32>(value);
  u16 sign = u16((bits >> 16) & 0x8000u);
  u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536 or more, or infinity
  if (magnitude < 0x38800000u) {
    // Below 2**-14 the result is subnormal: adding 0.5 aligns its last place (2**-24) with the float's own last place,
    // so that the float addition does the rounding.
    return sign | u16(bit_cast<u32>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
  }
  u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return sign | u16((rounded - 0x38000000u) >> 13);  // 65520 or more carries into the exponent and becomes infinity
}

inline float float_from_f16(u16 bits) {
  u32 sign = u32(bits & 0x8000u) << 16;
  u32 shifted = u32(bits & 0x7fffu) << 13;
  // Read as a float, the pattern is too small by 2**112, subnormals included. Infinity and NaN need the remaining bits
  // of their exponent. There is no branch, so that loops can be vectorised.
  u32 scaled = bit_cast<u32>(bit_cast<float>(shifted) * 0x1p112f);
  return bit_cast<float>(sign | scaled | (shifted >= 0x0f800000u ? 0x7f800000u : 0));
}

}  // namespace emulator
