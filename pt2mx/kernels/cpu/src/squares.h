// The product of 32 rows of bfloat16 values with panels of 32 rows of the other operand, in the matrix registers of AMX
// or by AVX512_BF16, with sums in fp32.
//
// Both take subnormal numbers for zero. Where the least values of both operands are so small that a product could be
// one, the caller multiplies in another way.

#pragma once

#include "units.h"

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kStripSums = 8;           // groups that are summed by themselves
constexpr i64 kSquare = kPair * kPair;  // sums of a call of a kernel

// sums: (kPair, kPair), `across` values a row, = x: kPair rows of `groups` groups, `stride` values apart, times w:
// (groups, 2, kSide pairs of values, kSide rows, 2).
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void square_in_tiles(const u16* x, i64 stride, const u16* w,
                                                                           i64 groups, float* sums, i64 across) {
  const u16* below = x + kSide * stride;
  const i64 bytes = 2 * stride, row = 4 * across;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 g = 0; g < groups; ++g, x += kGroup, below += kGroup, w += 2 * kTile) {
    _tile_loadd(4, x, bytes);
    _tile_loadd(6, w, 64);
    _tile_loadd(5, below, bytes);
    _tile_loadd(7, w + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + kSide, row);
  _tile_stored(2, sums + kSide * across, row);
  _tile_stored(3, sums + kSide * across + kSide, row);
}

// sums: (panels, kPair, kPair), and room for one more, = x as above, times w: (panels, groups, ..). A strip of x stays
// in the first-level cache.
inline void squares_in_tiles(const u16* x, i64 stride, const u16* w, i64 groups, i64 panels, float* sums) {
  float* strip = sums + panels * kSquare;
  for (i64 g = 0; g < groups; g += kStripSums) {
    const i64 depth = std::min(kStripSums, groups - g);
    for (i64 p = 0; p < panels; ++p) {
      float* total = sums + p * kSquare;
      square_in_tiles(x + g * kGroup, stride, w + (p * groups + g) * 2 * kTile, depth, g ? strip : total, kPair);
      for (i64 i = 0; g && i < kSquare; ++i) total[i] += strip[i];
    }
  }
}

// sums: (rows, kPair), `across` values a row, = x: (taps, kPair) pixels of `k` values, times w: (taps, groups, ..) as
// above. Rows up to a multiple of 8 are written, and values are read up to an even number. A tap of which all pixels
// are `outside` is left out. A strip of w stays in the first-level cache for all rows.
__attribute__((target("avx512bf16"))) NOINLINE void square_in_vectors(const u16* const* x, i64 rows, const u16* w,
                                                                      i64 taps, i64 k, float* sums, i64 across,
                                                                      const u16* outside = nullptr) {
  constexpr int kRowsOfX = 8;
  const i64 groups = (k + kGroup - 1) / kGroup, all = taps * groups;
  for (i64 begin = 0; begin < all; begin += kStripSums) {
    const i64 end = std::min(begin + kStripSums, all);
    for (i64 row = 0; row < rows; row += kRowsOfX) {
      __m512 sum[kRowsOfX][2] = {};
      for (i64 at = begin, tap = begin / groups, n; at < end; at += n, ++tap) {
        n = std::min((tap + 1) * groups, end) - at;
        const u16* const* pixels = x + tap * kPair + row;
        if (!_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(pixels), _mm512_set1_epi64(i64(outside)))) continue;
        const u16* pixel[kRowsOfX];
        std::copy(pixels, pixels + kRowsOfX, pixel);
        const u16* values = w + at * 2 * kTile;
        i64 i = (at - tap * groups) * kGroup;
        for (const i64 last = std::min(i + n * kGroup, k); i < last; values += kTile) {
#pragma GCC unroll 4  // of so many branches less the processor foresees the last one
          for (const i64 next = std::min(i + kGroup, last); i < next; i += 2, values += kGroup) {
            const __m512bh first = __m512bh(_mm512_loadu_si512(values));
            const __m512bh second = __m512bh(_mm512_loadu_si512(values + kTile));
            for (int r = 0; r < kRowsOfX; ++r) {
              const __m512bh both = __m512bh(_mm512_set1_epi32(load<int32_t>(pixel[r] + i)));
              sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, first);
              sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, second);
            }
          }
        }
      }
      for (int r = 0; r < kRowsOfX; ++r) {
        for (int h = 0; h < 2; ++h) {
          float* total = sums + (row + r) * across + h * kSide;
          const __m512 before = begin ? _mm512_loadu_ps(total) : _mm512_setzero_ps();
          _mm512_storeu_ps(total, _mm512_add_ps(before, sum[r][h]));
        }
      }
    }
  }
}

// The exponent of the least value that is not zero, with its bias; 0 of a subnormal one.
inline i64 least_exponent(const u16* values, i64 n) {
  u16 least = 0x7FFE;
#pragma omp simd reduction(min : least)
  for (i64 i = 0; i < n; ++i) least = std::min(least, u16((values[i] & 0x7FFF) - 1));
  return (least + 1) >> 7;
}

// Whether products of values with these least exponents are normal numbers, as the values are.
inline bool is_served(i64 x, i64 w) { return x > 0 && w > 0 && x + w - 2 * kBias >= 1 - kBias; }

// A (16, 16) matrix of pairs, in place.
inline void transpose(u16* pairs) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(pairs + i * kGroup);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {  // lanes of 128 bits: of rows i, i + 4, i + 8 and i + 12
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const __m512i low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    b[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xDD);
    b[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xDD);
  }
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(pairs + i * kGroup, b[i]);
}

}  // namespace

#endif
