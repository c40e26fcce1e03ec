// CUDA's float functions. Those of the C library are declared here instead of included (see emulator.h). Approximate
// functions return the exact result rounded to float, which is at least as accurate as on a GPU, but not bitwise equal.
#pragma once

extern "C" {
#define FLASHGEN_UNARY(name) float name(float) noexcept;
FLASHGEN_UNARY(sqrtf)
FLASHGEN_UNARY(expf)
FLASHGEN_UNARY(exp2f)
FLASHGEN_UNARY(expm1f)
FLASHGEN_UNARY(logf)
FLASHGEN_UNARY(log2f)
FLASHGEN_UNARY(log10f)
FLASHGEN_UNARY(log1pf)
FLASHGEN_UNARY(sinf)
FLASHGEN_UNARY(cosf)
FLASHGEN_UNARY(tanf)
FLASHGEN_UNARY(tanhf)
FLASHGEN_UNARY(erff)
FLASHGEN_UNARY(floorf)
FLASHGEN_UNARY(ceilf)
FLASHGEN_UNARY(truncf)
FLASHGEN_UNARY(rintf)
FLASHGEN_UNARY(roundf)
FLASHGEN_UNARY(fabsf)
#undef FLASHGEN_UNARY
float fmaf(float, float, float) noexcept;
float fmodf(float, float) noexcept;
float powf(float, float) noexcept;
float copysignf(float, float) noexcept;
double sqrt(double) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double floor(double) noexcept;
double fabs(double) noexcept;
}

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float exp10f(float value) { return powf(10.0f, value); }

// max and min as in PTX: they return the other operand if one is NaN, and -0.0 is less than +0.0. Those of the C
// library, and compiler builtins, may return either zero.
inline float fmaxf(float a, float b) {
  return a > b || b != b || (a == b && !__builtin_signbit(a)) ? a : b;
}
inline float fminf(float a, float b) {
  return a < b || b != b || (a == b && __builtin_signbit(a)) ? a : b;
}
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float abs(float value) { return fabsf(value); }
inline bool isnan(float value) { return __builtin_isnan(value); }
inline bool isinf(float value) { return __builtin_isinf(value); }
inline bool isfinite(float value) { return __builtin_isfinite(value); }

inline float __expf(float value) { return expf(value); }
inline float __exp10f(float value) { return exp10f(value); }
inline float __logf(float value) { return logf(value); }
inline float __log2f(float value) { return log2f(value); }
inline float __sinf(float value) { return sinf(value); }
inline float __cosf(float value) { return cosf(value); }
inline float __powf(float base, float exponent) { return powf(base, exponent); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __frsqrt_rn(float value) { return rsqrtf(value); }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float value) { return fminf(fmaxf(value, 0.0f), 1.0f); }

inline float __int_as_float(int bits) { return ::emulator::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return ::emulator::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return ::emulator::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return ::emulator::bit_cast<unsigned>(value); }

// Conversions to int saturate and turn NaN into 0 as cvt does. An out-of-range C++ cast would be undefined.
namespace emulator {
inline int saturated_int(float value) {
  if (!(value == value)) return 0;
  if (value >= 2147483648.0f) return 2147483647;
  if (value <= -2147483648.0f) return -2147483647 - 1;
  return int(value);
}
}  // namespace emulator
inline int __float2int_rn(float value) { return ::emulator::saturated_int(rintf(value)); }
inline int __float2int_rd(float value) { return ::emulator::saturated_int(floorf(value)); }
inline int __float2int_ru(float value) { return ::emulator::saturated_int(ceilf(value)); }
inline int __float2int_rz(float value) { return ::emulator::saturated_int(value); }
inline float __int2float_rn(int value) { return float(value); }
inline float __uint2float_rn(unsigned value) { return float(value); }
