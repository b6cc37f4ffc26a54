// Scales with a significand: from amax to codes to values, as pt2mx/kernels/float_scales.py defines them. Each step is
// one float32 operation: divisions are true divisions.

#pragma once

#include "floats.h"

namespace {

// Returns the scale of a byte: moves its exponent and mantissa to the fields of a float, and multiplies by a power of
// two for the other bias.
inline float value_of_byte(int32_t code, const FloatScale& s) {
  const int32_t magnitude = code & s.magnitude, sign = code & s.sign ? kSign : 0;
  const float value = from_bits(u32(magnitude) << (23 - s.mantissa_bits)) * from_bits((2 * kBias - s.bias) << 23);
  return magnitude > s.max_code ? from_bits(0x7FC00000) : from_bits(bits_of(value) | sign);
}

inline float value_of(int32_t code, const FloatScale& s) {
  const float value = s.dtype == FP32   ? from_bits(code)
                      : s.dtype == FP16 ? widen_half(u16(code))
                      : s.dtype == BF16 ? from_bits(u32(code) << 16)
                                        : value_of_byte(code, s);
  return value == value ? value : from_bits(0x7FC00000);  // as narrow_bfloat needs it
}

// The code of the scale nearest to a value up to the largest one, ties to even.
inline int32_t code_of(float value, const FloatScale& s) {
  if (s.dtype == FP32) return int32_t(bits_of(value));
  if (s.dtype == FP16) return narrow_half(value);
  if (s.dtype == BF16) return narrow_bfloat(value);
  const int32_t shift = 23 - s.mantissa_bits, lowest = (s.emin + kBias) << 23;
  const int32_t binade = std::max(int32_t(bits_of(value)) & kInf, lowest);
  // a unit in its last place is one quantum; of Inf and NaN, whose result is discarded, the sum is beyond int32
  const float rounder = from_bits(u32(binade) + (u32(shift) << 23));
  const int32_t quanta = int32_t(bits_of(value + rounder) - bits_of(rounder));
  return std::min(((binade - lowest) >> shift) + quanta, s.max_code);
}

// Codes of blocks with these amax, before a search: the scale is `factor` times the quotient. t: the tensor's scale.
NOINLINE void codes_of_amax(const u32* amax, i64 n, const FloatScale& scale, float t, float factor, int32_t* codes) {
  const FloatScale s = scale;
  for (i64 i = 0; i < n; ++i) {
    const float a = from_bits(amax[i]);
    float quotient;
    if (s.tensor == FACTOR) quotient = s.reciprocal ? a / s.most / t : a / (s.most * t);
    else quotient = s.tensor == DIVISOR ? a / s.most * t : a / s.most;
    quotient = factor == 1 ? quotient : quotient * factor;
    quotient = quotient <= s.zero_below ? s.zero : quotient;
    quotient = std::min(std::max(quotient, s.least), s.max_value);
    int32_t code = code_of(quotient, s);
    if (s.rounds_up) code += value_of(code, s) < quotient;
    codes[i] = amax[i] < u32(kInf) ? code : s.nan;
  }
}

// Codes of one candidate of a search, a factor of the quotient and an offset to the code.
inline void candidate_codes(const u32* amax, i64 n, const FloatScale& s, float t, int32_t candidate, int32_t* codes) {
  const int32_t offset = s.code_offsets[candidate % s.offset_count];
  codes_of_amax(amax, n, s, t, s.factors[candidate / s.offset_count], codes);
  for (i64 i = 0; i < n && offset; ++i) {
    if (amax[i] < u32(kInf)) codes[i] = std::min(std::max(codes[i] + offset, s.smallest), s.largest);
  }
}

// What multiplies codes in units of the element, and what divides values, or multiplies them if `s.reciprocal`.
inline float applied(float scale, const FloatScale& s, float t) {
  return s.tensor == FACTOR ? scale * t : s.tensor == DIVISOR ? scale / t : scale;
}
inline float divisor_or_reciprocal(float scale, const FloatScale& s, float t) {
  if (!s.reciprocal) return applied(scale, s, t);
  return s.tensor == FACTOR ? 1 / t / scale : s.tensor == DIVISOR ? t / scale : 1 / scale;
}

// Writes the scales [at, at + n) times a factor. Returns true if they are bytes without a sign, and no NaN.
NOINLINE bool load_scales(const FloatScale& s, const void* stored, i64 at, i64 n, float factor, float* out) {
  if (s.dtype != BYTE) {
    get_floats(stored, at, n, s.dtype, out);
    for (i64 i = 0; i < n; ++i) out[i] = (out[i] == out[i] ? out[i] : from_bits(0x7FC00000)) * factor;
    return false;
  }
  const u8* bytes = static_cast<const u8*>(stored) + at;
  const int32_t shift = 23 - s.mantissa_bits, max_code = s.max_code;
  const float power = from_bits((2 * kBias - s.bias) << 23);
  int32_t most = 0;
  i64 i = 0;
#if defined(__AVX512BW__)
  __m512i largest = _mm512_setzero_si512();
  for (; i + 16 <= n; i += 16) {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    const __m512 values = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(codes, shift)), _mm512_set1_ps(power));
    largest = _mm512_max_epi32(largest, codes);
    _mm512_storeu_ps(out + i, _mm512_mul_ps(values, _mm512_set1_ps(factor)));
  }
  most = _mm512_reduce_max_epi32(largest);
#endif
  for (; i < n; ++i) {
    most = std::max<int32_t>(most, bytes[i]);
    out[i] = from_bits(u32(bytes[i]) << shift) * power * factor;
  }
  for (i = 0; i < n && most > max_code; ++i) out[i] = value_of_byte(bytes[i], s) * factor;
  return most <= max_code;
}

// Copies `n` stored scales to codes, or codes to stored scales.
inline void load_codes(const void* stored, i64 at, i64 n, int32_t dtype, int32_t* codes) {
  for (i64 i = 0; i < n; ++i) {
    if (dtype == FP32) codes[i] = static_cast<const int32_t*>(stored)[at + i];
    else if (dtype == BYTE) codes[i] = static_cast<const u8*>(stored)[at + i];
    else codes[i] = static_cast<const u16*>(stored)[at + i];
  }
}
inline void store_codes(const int32_t* codes, i64 n, int32_t dtype, void* stored, i64 at) {
  for (i64 i = 0; i < n; ++i) {
    if (dtype == FP32) static_cast<int32_t*>(stored)[at + i] = codes[i];
    else if (dtype == BYTE) static_cast<u8*>(stored)[at + i] = u8(codes[i]);
    else static_cast<u16*>(stored)[at + i] = u16(codes[i]);
  }
}

}  // namespace
