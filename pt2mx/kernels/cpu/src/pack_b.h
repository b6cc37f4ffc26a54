// Packs operands into the layouts that gemm_microkernel.h multiplies: rows of A, and panels of B. Operands are
// bfloat16, or fp32 with values that bfloat16 represents; packing checks this as it reads them.

#pragma once

#include "gemm_microkernel.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

// Statistics of the fp32 values that the kernels read.
struct ValueStats {
  __m512i bits = _mm512_setzero_si512(),
          least = _mm512_set1_epi32(-1);  // all bits; the smallest magnitude but zero, - 1

  __m512 add(__m512 values) {
    const __m512i value_bits = _mm512_castps_si512(values);
    const __m512i magnitudes = _mm512_and_si512(value_bits, _mm512_set1_epi32(kMagnitude));
    bits = _mm512_or_si512(bits, value_bits);
    least = _mm512_min_epu32(least, _mm512_sub_epi32(magnitudes, _mm512_set1_epi32(1)));
    return values;
  }
  // True if bfloat16 represents all values.
  bool are_bf16() const { return !_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xFFFF)); }
  // As `min_exponent_of`.
  i64 exponent() const { return (i64(_mm512_reduce_min_epu32(least)) + 1) >> 23; }
};

// The mask of lanes [first, first + 16) below `n`.
inline __mmask16 lanes(i64 first, i64 n) {
  const i64 count = std::min(std::max<i64>(n - first, 0), kTileRows);
  return __mmask16((u32(1) << count) - 1);
}

// A matrix in memory: (rows, columns); one of the strides is 1.
template <class T>
struct Strided {
  const T* values;
  i64 row, column;  // strides
};

// Writes the first `n` of 32 values as bfloat16, and zeros after them.
inline void put_group(const float* values, i64 n, u16* out, ValueStats& stats) {
  const __m512 first = stats.add(_mm512_maskz_loadu_ps(lanes(0, n), values));
  const __m512 second = stats.add(_mm512_maskz_loadu_ps(lanes(kTileRows, n), values + kTileRows));
  store_two(out, BF16, 0, Floats(first), Floats(second));
}
inline void put_group(const u16* values, i64 n, u16* out, ValueStats&) {
  const __mmask32 known = u32(lanes(kTileRows, n)) << kTileRows | lanes(0, n);
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(known, values));
}

// Loads the values in the mask as fp32, and zeros elsewhere.
inline __m512 known_values(const float* values, __mmask16 known) { return _mm512_maskz_loadu_ps(known, values); }
inline __m512 known_values(const u16* values, __mmask16 known) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(known, values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}

// As known_values, as bits, for the upper halves of 32 bits.
inline __m512i upper_halves(const float* values, __mmask16 known, ValueStats& stats) {
  return _mm512_castps_si512(stats.add(known_values(values, known)));
}
inline __m512i upper_halves(const u16* values, __mmask16 known, ValueStats&) {
  return _mm512_castps_si512(known_values(values, known));
}

// Packs `n` rows of `k` values each as A, padded with zeros.
template <class T>
void pack_rows(const T* x, i64 stride, i64 n, i64 k, StridesOfA strides, u16* out, ValueStats& stats) {
  for (i64 r = 0; r < kMR; ++r) {
    const i64 known = r < n ? k : 0;
    for (i64 i = 0; i < k; i += kGroup) {
      put_group(x + r * stride + i, known - i, out + r * strides.row + i / kGroup * strides.group, stats);
    }
  }
}

// Packs columns [first, first + kNR) of y: (k, n) as a panel of B, out: (groups, 2, kTileRows pairs of values,
// kTileRows columns, 2), padded with zeros.
template <class T>
void pack_panel(Strided<T> y, i64 first, i64 n, i64 k, u16* out, ValueStats& stats) {
  for (i64 g = 0; g < k; g += kGroup) {
    for (i64 column = first; column < first + kNR; column += kTileRows, out += kTileElems) {
      if (y.row == 1) {  // the values of a column are adjacent
        for (i64 c = 0; c < kTileRows; ++c) {
          put_group(y.values + (column + c) * y.column + g, column + c < n ? k - g : 0, out + c * kGroup, stats);
        }
        transpose(out);
        continue;
      }
      for (i64 pair = 0; pair < kTileRows; ++pair) {
        const i64 i = g + 2 * pair;
        const T* from = y.values + i * y.row + column;
        const __m512i even = upper_halves(from, i < k ? lanes(column, n) : 0, stats);
        const __m512i odd = upper_halves(from + y.row, i + 1 < k ? lanes(column, n) : 0, stats);
        const __m512i high = _mm512_and_si512(odd, _mm512_set1_epi32(int32_t(0xFFFF0000)));
        _mm512_storeu_si512(out + pair * kGroup, _mm512_or_si512(high, _mm512_srli_epi32(even, 16)));
      }
    }
  }
}

}  // namespace

#endif
