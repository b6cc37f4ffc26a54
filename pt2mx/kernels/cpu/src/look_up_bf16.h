// Codes of 4, 6 and 8 bits to bfloat16 by tables in registers, which is exact: two groups at a time.
//
// Values have no scale yet, and `bias` is added to the exponents of all but zero, which is +0. Subtracting the
// difference of bias and scale from the bits, saturated, leaves zero.

#pragma once

#include <type_traits>

#include "isa.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

#define TARGET_AVX512_VBMI __attribute__((target("avx512vbmi")))

namespace {

// Returns a value of the table of codes with the bias; +0 for zeros, Inf and NaN.
inline u16 biased(float value, i64 bias) {
  const u32 magnitude = bits_of(value) & kMagnitude;
  return magnitude && magnitude < u32(kInf) ? u16((bits_of(value) >> 16) + (bias << 7)) : 0;
}

inline __m512i load_groups(const u8* data, i64 bytes) { return _mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), data); }

// A look-up has
//   kBytes      bytes of a group
//   decode      kGroups groups to vectors of 32 values
//   invalid     true if a code was no finite number

// 64 entries of 8 bits: the tables have the low and the high byte of a value.
template <int Bits>
struct LookUpBits {
  static constexpr i64 kBytes = kGroup * Bits / 8;
  __m512i low, high, spread, shifts;

  LookUpBits(const LinearCall& call, i64 bias) {
    u8 bytes[4][64];
    for (int i = 0; i < 64; ++i) {
      const u16 value = biased(call.table[i % (1 << Bits)], bias);
      bytes[0][i] = u8(value);
      bytes[1][i] = u8(value >> 8);
      // Unpacking takes the lower halves of 128-bit lanes for the first group. 64 bits get the bytes of eight codes.
      const int octet = i / 8 % 2 * 4 + i / 16;
      bytes[2][i] = u8(std::min(octet * Bits + i % 8, 63));
      bytes[3][i] = u8(i % 8 * Bits);
    }
    low = _mm512_loadu_si512(bytes[0]);
    high = _mm512_loadu_si512(bytes[1]);
    spread = _mm512_loadu_si512(bytes[2]);
    shifts = _mm512_loadu_si512(bytes[3]);
  }
  template <i64 kGroups>
  TARGET_AVX512_VBMI void decode(const u8* data, __m512i* out) const {
    const __m512i bytes = _mm512_permutexvar_epi8(spread, load_groups(data, kGroups * kBytes));
    const __m512i codes = _mm512_multishift_epi64_epi8(shifts, bytes);  // a look-up takes the lowest six bits
    const __m512i first = _mm512_permutexvar_epi8(codes, low), second = _mm512_permutexvar_epi8(codes, high);
    out[0] = _mm512_unpacklo_epi8(first, second);
    out[1] = _mm512_unpackhi_epi8(first, second);
  }
  bool invalid() const { return false; }
};

// Floats or integers of 8 bits: the tables have 128 magnitudes.
template <bool kInt>
struct LookUpBytes {
  static constexpr i64 kBytes = kGroup;
  __m512i low[2], high[2], most;
  u16 lowest;  // integer, which has no magnitude
  __m512i largest = _mm512_setzero_si512();

  LookUpBytes(const LinearCall& call, i64 bias) : lowest(biased(call.table[128], bias)) {
    u8 bytes[2][128], finite = 0;
    for (int i = 0; i < 128; ++i) {
      const u16 value = biased(call.table[i], bias);
      bytes[0][i] = u8(value);
      bytes[1][i] = u8(value >> 8);
      if (bits_of(call.table[i]) < u32(kInf)) finite = u8(i);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_loadu_si512(bytes[0] + 64 * half);
      high[half] = _mm512_loadu_si512(bytes[1] + 64 * half);
    }
    most = _mm512_set1_epi8(char(finite));
  }
  template <i64 kGroups>
  TARGET_AVX512_VBMI void decode(const u8* data, __m512i* out) {
    // unpacking takes the lower halves of all 128-bit lanes, then the upper halves
    const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(char(0x80));
    const __m512i codes = _mm512_permutexvar_epi64(halves, load_groups(data, kGroups * kBytes));
    const __m512i magnitudes = kInt ? _mm512_abs_epi8(codes) : codes;  // a look-up takes seven bits
    __m512i first = _mm512_permutex2var_epi8(low[0], magnitudes, low[1]);
    __m512i second = _mm512_permutex2var_epi8(high[0], magnitudes, high[1]);
    if (kInt) {
      second = _mm512_ternarylogic_epi32(second, codes, sign, 0xF8);
      if (const __mmask64 extreme = _mm512_cmpeq_epi8_mask(codes, sign)) {
        first = _mm512_mask_mov_epi8(first, extreme, _mm512_set1_epi8(char(lowest)));
        second = _mm512_mask_mov_epi8(second, extreme, _mm512_set1_epi8(char(lowest >> 8)));
      }
    } else {
      const __m512i magnitude = _mm512_andnot_si512(sign, codes);
      largest = _mm512_max_epu8(largest, magnitude);
      second = _mm512_or_si512(
          second, _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(magnitude, magnitude), _mm512_and_si512(codes, sign)));
    }
    out[0] = _mm512_unpacklo_epi8(first, second);
    out[1] = _mm512_unpackhi_epi8(first, second);
  }
  bool invalid() const { return _mm512_cmpgt_epu8_mask(largest, most); }
};

// The look-up of a decoder's codes.
template <class Decoder>
struct LookUpOf;
template <>
struct LookUpOf<Nibbles> {
  using type = LookUpBits<4>;
};
template <>
struct LookUpOf<Int8> {
  using type = LookUpBytes<true>;
};
template <int E, int M, bool Nan>
struct LookUpOf<Halves<E, M, Nan>> {
  using type = std::conditional_t<E + M == 7, LookUpBytes<false>, LookUpBits<6>>;
};

}  // namespace

#endif
