// Operands in fp32 whose values bfloat16 holds, in the order in which squares.h multiplies them.

#pragma once

#include "squares.h"

#if defined(PT2MX_TILES)

namespace {

// What is known of the values that were read.
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
struct Strided {
  const float* values;
  i64 row, column;  // strides
};

// `n` rows of `k` values each: out (kPair, groups * kGroup), filled with zeros.
inline void pack_rows(const float* x, i64 stride, i64 n, i64 k, u16* out, Seen& seen) {
  const i64 width = (k + kGroup - 1) / kGroup * kGroup;
  for (i64 r = 0; r < kPair; ++r) {
    const i64 known = r < n ? k : 0;
    for (i64 i = 0; i < width; i += kGroup, out += kGroup) {
      const __m512 first = seen.add(_mm512_maskz_loadu_ps(lanes(i, known), x + r * stride + i));
      const __m512 second = seen.add(_mm512_maskz_loadu_ps(lanes(i + kSide, known), x + r * stride + i + kSide));
      store_two(out, BF16, 0, Floats(first), Floats(second));
    }
  }
}

// Columns [first, first + kPair) of y: (k, n), of which those up to `n` exist: out (groups, 2, kSide pairs of values,
// kSide columns, 2).
inline void pack_panel(Strided y, i64 first, i64 n, i64 k, u16* out, Seen& seen) {
  for (i64 g = 0; g < k; g += kGroup) {
    for (i64 column = first; column < first + kPair; column += kSide, out += kTile) {
      if (y.row == 1) {  // a column's values are next to each other
        for (i64 c = 0; c < kSide; ++c) {
          const float* from = y.values + (column + c) * y.column + g;
          const i64 known = column + c < n ? k : 0;
          const __m512 even = seen.add(_mm512_maskz_loadu_ps(lanes(g, known), from));
          const __m512 odd = seen.add(_mm512_maskz_loadu_ps(lanes(g + kSide, known), from + kSide));
          store_two(out + c * kGroup, BF16, 0, Floats(even), Floats(odd));
        }
        transpose(out);
        continue;
      }
      for (i64 pair = 0; pair < kSide; ++pair) {
        const i64 i = g + 2 * pair;
        const float* from = y.values + i * y.row + column;
        const __m512 even = seen.add(_mm512_maskz_loadu_ps(i < k ? lanes(column, n) : 0, from));
        const __m512 odd = seen.add(_mm512_maskz_loadu_ps(i + 1 < k ? lanes(column, n) : 0, from + y.row));
        const __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(int32_t(0xFFFF0000)));
        const __m512i both = _mm512_or_si512(high, _mm512_srli_epi32(_mm512_castps_si512(even), 16));
        _mm512_storeu_si512(out + pair * kGroup, both);
      }
    }
  }
}

}  // namespace

#endif
