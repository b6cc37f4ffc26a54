// The GEMM micro-kernels: 32 rows of bfloat16 values (A) times panels of 32 columns (B), by AMX or AVX512_BF16, with
// sums in fp32. pack_b.h and gemm_bf16.h write panels.
//
// A group is 32 values of k. For each group a panel has two tiles of 16 columns. A tile has a row for each pair of
// values of k, because an instruction multiplies pairs and adds both products to one sum:
//
//     tile of B:          column 0        column 1       ...       column 15
//     row 0            k = 0   k = 1   k = 0   k = 1              k = 0   k = 1
//     row 1            k = 2   k = 3   k = 2   k = 3              k = 2   k = 3
//     ...
//     row 15           k = 30  k = 31  k = 30  k = 31             k = 30  k = 31
//
// AMX has eight tile registers, tmm0 to tmm7. Four hold sums, so that each of the other four is used twice:
//
//                                       B: a panel of 32 columns
//                                    tmm6             tmm7
//                                columns 0..15    columns 16..31
//                               +----------------+----------------+
//     A       tmm4, rows  0..15 | tmm0 += 4 * 6  | tmm1 += 4 * 7  |    a micro-tile of the result:
//     32 rows                   +----------------+----------------+    kMR x kNR sums in fp32
//             tmm5, rows 16..31 | tmm2 += 5 * 6  | tmm3 += 5 * 7  |
//                               +----------------+----------------+
//
// AMX reads A as (groups, kMR, kGroup), AVX512_BF16 as (kMR, groups, kGroup): a tile register of rows that are a power
// of two apart would come from few sets of the first-level cache, which evict each other.
//
// Both instruction sets treat subnormal numbers as zero. If the smallest values of both operands could have a subnormal
// product (`products_are_normal`), the caller uses another kernel.

#pragma once

#include "int8_codes.h"
#include "isa.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kMicroTile = kMR * kNR;      // sums of a micro-tile
constexpr i64 kMicroGroup = kMR * kGroup;  // values of a group of A, and of a panel

// Values from a row of A to the next one, and from a group of a row to the next one.
struct StridesOfA {
  i64 row, group;
  StridesOfA(bool amx, i64 groups) : row(amx ? kGroup : groups * kGroup), group(amx ? kMicroGroup : kGroup) {}
};

// sums: (kMR, kNR), rows `across` values apart, = x: (groups, kMR, kGroup) times a panel w: (groups, 2, kTileRows pairs
// of values, kTileRows columns, 2).
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void microkernel_32x32_amx(const u16* x, const u16* w, i64 groups,
                                                                                 float* sums, i64 across) {
  const i64 row = 4 * across;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 g = 0; g < groups; ++g, x += kMicroGroup, w += kMicroGroup) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, 64);
    _tile_loadd(5, x + kTileElems, 64);
    _tile_loadd(7, w + kTileElems, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + kTileRows, row);
  _tile_stored(2, sums + kTileRows * across, row);
  _tile_stored(3, sums + kTileRows * across + kTileRows, row);
}

// sums: (panels, kMR, kNR) = x as above, times w: (panels, groups, ..); or sums += that, if they have `earlier` groups.
// A strip of x stays in the first-level cache.
inline void gemm_panels_amx(const u16* x, const u16* w, i64 groups, i64 panels, float* sums, bool earlier = false) {
  alignas(64) float strip[kMicroTile];
  for (i64 g = 0; g < groups; g += kStripGroups) {
    const i64 depth = std::min(kStripGroups, groups - g);
    for (i64 p = 0; p < panels; ++p) {
      float* total = sums + p * kMicroTile;
      microkernel_32x32_amx(x + g * kMicroGroup, w + (p * groups + g) * kMicroGroup, depth,
                            g || earlier ? strip : total, kNR);
      for (i64 i = 0; (g || earlier) && i < kMicroTile; ++i) total[i] += strip[i];
    }
  }
}

// sums: (rows, kNR), rows `across` values apart, = x: (taps, kMR) pointers to pixels of `k` values, times w: (taps,
// groups, ..) as above. Writes rows up to a multiple of 8, and reads values up to an even number. Skips a tap if all
// its pixels are `outside`. A strip of w stays in the first-level cache for all rows.
__attribute__((target("avx512bf16"))) NOINLINE void microkernel_32x32_avx512(const u16* const* x, i64 rows,
                                                                             const u16* w, i64 taps, i64 k, float* sums,
                                                                             i64 across, const u16* outside = nullptr) {
  constexpr int kRowsOfX = 8;
  const i64 groups = (k + kGroup - 1) / kGroup, all = taps * groups;
  for (i64 begin = 0; begin < all; begin += kStripGroups) {
    const i64 end = std::min(begin + kStripGroups, all);
    for (i64 row = 0; row < rows; row += kRowsOfX) {
      __m512 sum[kRowsOfX][2] = {};
      for (i64 at = begin, tap = begin / groups, n; at < end; at += n, ++tap) {
        n = std::min((tap + 1) * groups, end) - at;
        const u16* const* pixels = x + tap * kMR + row;
        if (!_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(pixels), _mm512_set1_epi64(i64(outside)))) continue;
        const u16* pixel[kRowsOfX];
        std::copy(pixels, pixels + kRowsOfX, pixel);
        const u16* values = w + at * 2 * kTileElems;
        i64 i = (at - tap * groups) * kGroup;
        for (const i64 last = std::min(i + n * kGroup, k); i < last; values += kTileElems) {
#pragma GCC unroll 4  // unrolled, so that the processor predicts the loop's last branch
          for (const i64 next = std::min(i + kGroup, last); i < next; i += 2, values += kGroup) {
            const __m512bh first = __m512bh(_mm512_loadu_si512(values));
            const __m512bh second = __m512bh(_mm512_loadu_si512(values + kTileElems));
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
          float* total = sums + (row + r) * across + h * kTileRows;
          const __m512 before = begin ? _mm512_loadu_ps(total) : _mm512_setzero_ps();
          _mm512_storeu_ps(total, _mm512_add_ps(before, sum[r][h]));
        }
      }
    }
  }
}

// Returns the biased exponent of the smallest value but zero; 0 if it is subnormal.
inline i64 min_exponent_of(const u16* values, i64 n) {
  u16 least = 0x7FFE;
#pragma omp simd reduction(min : least)
  for (i64 i = 0; i < n; ++i) least = std::min(least, u16((values[i] & 0x7FFF) - 1));
  return (least + 1) >> 7;
}

// True if values with these smallest exponents are normal numbers, and so are their products.
inline bool products_are_normal(i64 x, i64 w) { return x > 0 && w > 0 && x + w - 2 * kBias >= 1 - kBias; }

// Transposes a (16, 16) matrix of pairs in place.
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
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes of rows i, i + 4, i + 8 and i + 12
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
