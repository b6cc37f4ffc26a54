// Operands in bfloat16, or in fp32 whose values bfloat16 holds, in the order in which squares.h multiplies them.

#pragma once

#include "squares.h"

#if defined(PT2MX_TILES)

namespace {

// What is known of the values in fp32 that were read.
struct Seen {
  __m512i bits = _mm512_setzero_si512(), least = _mm512_set1_epi32(-1);  // the least magnitude but zero, less 1

  __m512 add(__m512 values) {
    const __m512i own = _mm512_castps_si512(values);
    const __m512i magnitudes = _mm512_and_si512(own, _mm512_set1_epi32(kMagnitude));
    bits = _mm512_or_si512(bits, own);
    least = _mm512_min_epu32(least, _mm512_sub_epi32(magnitudes, _mm512_set1_epi32(1)));
    return values;
  }
  // Whether a bfloat16 holds them all.
  bool are_bfloats() const { return !_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xFFFF)); }
  // As `least_exponent`.
  i64 exponent() const { return (i64(_mm512_reduce_min_epu32(least)) + 1) >> 23; }
};

// The lanes [first, first + 16) of which `n` exist.
inline __mmask16 lanes(i64 first, i64 n) {
  const i64 count = std::min(std::max<i64>(n - first, 0), kSide);
  return __mmask16((u32(1) << count) - 1);
}

// A matrix in memory: (rows, columns), one of which are next to each other.
template <class T>
struct Strided {
  const T* values;
  i64 row, column;  // strides
};

// Up to 32 values, of which `n` exist, as bfloat16.
inline void put_group(const float* values, i64 n, u16* out, Seen& seen) {
  const __m512 first = seen.add(_mm512_maskz_loadu_ps(lanes(0, n), values));
  const __m512 second = seen.add(_mm512_maskz_loadu_ps(lanes(kSide, n), values + kSide));
  store_two(out, BF16, 0, Floats(first), Floats(second));
}
inline void put_group(const u16* values, i64 n, u16* out, Seen&) {
  const __mmask32 known = u32(lanes(kSide, n)) << kSide | lanes(0, n);
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(known, values));
}

// 16 values, of which those in the mask exist.
inline __m512 known_values(const float* values, __mmask16 known) { return _mm512_maskz_loadu_ps(known, values); }
inline __m512 known_values(const u16* values, __mmask16 known) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(known, values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}

// The same in the upper half of 32 bits.
inline __m512i upper_halves(const float* values, __mmask16 known, Seen& seen) {
  return _mm512_castps_si512(seen.add(known_values(values, known)));
}
inline __m512i upper_halves(const u16* values, __mmask16 known, Seen&) {
  return _mm512_castps_si512(known_values(values, known));
}

// `n` rows of `k` values each: out (kPair, groups * kGroup), filled with zeros.
template <class T>
void pack_rows(const T* x, i64 stride, i64 n, i64 k, u16* out, Seen& seen) {
  const i64 width = (k + kGroup - 1) / kGroup * kGroup;
  for (i64 r = 0; r < kPair; ++r) {
    const i64 known = r < n ? k : 0;
    for (i64 i = 0; i < width; i += kGroup, out += kGroup) put_group(x + r * stride + i, known - i, out, seen);
  }
}

// Columns [first, first + kPair) of y: (k, n), of which those up to `n` exist: out (groups, 2, kSide pairs of values,
// kSide columns, 2).
template <class T>
void pack_panel(Strided<T> y, i64 first, i64 n, i64 k, u16* out, Seen& seen) {
  for (i64 g = 0; g < k; g += kGroup) {
    for (i64 column = first; column < first + kPair; column += kSide, out += kTile) {
      if (y.row == 1) {  // a column's values are next to each other
        for (i64 c = 0; c < kSide; ++c) {
          put_group(y.values + (column + c) * y.column + g, column + c < n ? k - g : 0, out + c * kGroup, seen);
        }
        transpose(out);
        continue;
      }
      for (i64 pair = 0; pair < kSide; ++pair) {
        const i64 i = g + 2 * pair;
        const T* from = y.values + i * y.row + column;
        const __m512i even = upper_halves(from, i < k ? lanes(column, n) : 0, seen);
        const __m512i odd = upper_halves(from + y.row, i + 1 < k ? lanes(column, n) : 0, seen);
        const __m512i high = _mm512_and_si512(odd, _mm512_set1_epi32(int32_t(0xFFFF0000)));
        _mm512_storeu_si512(out + pair * kGroup, _mm512_or_si512(high, _mm512_srli_epi32(even, 16)));
      }
    }
  }
}

}  // namespace

#endif
