// Reads a weight as integer codes and powers of two, a strip of groups of kWidth rows at a time, for the kernels that
// multiply integers.

#pragma once

#include "int8_columns.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

// Up to kStripGroups groups of kWidth rows of the weight. They are copied, because rows a power of two apart share few
// lines of the cache.
template <class Decoder>
struct Strip {
  static constexpr i64 kBytes = kStripGroups * Decoder::kBytes;
  alignas(64) u8 codes[kWidth * kBytes];
  u8 scales[kWidth * kStripGroups];

  // length: bytes of a row from c.data on, which may be one of several taps.
  void read(const LinearCall& c, i64 length, i64 row, i64 first, i64 groups) {
    const i64 begin = first * Decoder::kBytes, per_block = c.block / kGroup;
    if (row + kWidth <= c.n && groups == kStripGroups && begin + kBytes <= length && per_block == 1) {
      const u8 *data = c.data + row * c.row_bytes + begin, *scale = c.scale + row * c.row_blocks + first;
      for (i64 q = 0; q < kWidth; ++q, data += c.row_bytes, scale += c.row_blocks) {
        std::memcpy(codes + q * kBytes, data, kBytes);
        std::memcpy(scales + q * kStripGroups, scale, kStripGroups);
      }
      return;
    }
    const i64 bytes = std::min(kBytes, length - begin);
    for (i64 q = 0; q < kWidth; ++q) {
      const i64 at = std::min(row + q, c.n - 1);
      std::memcpy(codes + q * kBytes, c.data + at * c.row_bytes + begin, bytes);
      std::memset(codes + q * kBytes + bytes, 0, kBytes - bytes);  // so that zeros fill a group of zeros
      for (i64 g = 0; g < kStripGroups; ++g) {
        scales[q * kStripGroups + g] = g < groups ? c.scale[at * c.row_blocks + (first + g) / per_block] : kBias;
      }
    }
  }
  // Prefetches an eighth of the codes of kWidth rows from `row` on.
  static void prefetch(const LinearCall& c, i64 row, i64 first, i64 eighth) {
    const u8* data = c.data + row * c.row_bytes + first * Decoder::kBytes;
    for (i64 q = eighth * kWidth / 8; q < (eighth + 1) * kWidth / 8; ++q) {
      for (i64 b = 0; b < kBytes; b += 64) __builtin_prefetch(data + q * c.row_bytes + b);
    }
  }
};

// Transposes the scales of 8 groups of 8 rows: out[i] has those of groups 2 i and 2 i + 1.
inline void transpose_scales(const u8* scale, __m128i* out) {
  __m128i pairs[4], quads[4];
  for (int i = 0; i < 4; ++i) {
    const u8* row = scale + 2 * i * kStripGroups;
    pairs[i] = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)),
                                 _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + kStripGroups)));
  }
  for (int i = 0; i < 2; ++i) {
    quads[i] = _mm_unpacklo_epi16(pairs[2 * i], pairs[2 * i + 1]);
    quads[2 + i] = _mm_unpackhi_epi16(pairs[2 * i], pairs[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = _mm_unpacklo_epi32(quads[2 * i], quads[2 * i + 1]);
    out[2 * i + 1] = _mm_unpackhi_epi32(quads[2 * i], quads[2 * i + 1]);
  }
}

// Sets the powers of two of a strip's scales times 2**-shift. Returns false if a scale is not in `range`, except the
// scale of a group of zeros, whose codes equal `offset`.
inline bool set_powers(const u8* scale, i64 groups, int32_t shift, ScaleRange range, u8 offset, GroupColumns* w) {
  const auto [least, most] = range;
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
  for (i64 half = 0; half < kWidth; half += 8) {
    __m128i pairs[4];
    transpose_scales(scale + half * kStripGroups, pairs);
    for (int i = 0; i < 4; ++i) {
      smallest = _mm_min_epu8(smallest, pairs[i]);
      largest = _mm_max_epu8(largest, pairs[i]);
      const __m256i shifts = _mm256_set1_epi32(shift);
      const __m256i scales[2] = {_mm256_cvtepu8_epi32(pairs[i]), _mm256_cvtepu8_epi32(_mm_srli_si128(pairs[i], 8))};
      for (int g = 0; g < 2; ++g) {
        store(w[2 * i + g].powers + half, _mm256_slli_epi32(_mm256_sub_epi32(scales[g], shifts), 23));
      }
    }
  }
  const __m128i low = _mm_set1_epi8(char(std::min(least, 255))), high = _mm_set1_epi8(char(std::max(most, 0)));
  const __m128i usual = _mm_and_si128(_mm_cmpeq_epi8(_mm_max_epu8(smallest, low), smallest),
                                      _mm_cmpeq_epi8(_mm_min_epu8(largest, high), largest));
  if (least <= 254 && most >= 0 && _mm_movemask_epi8(usual) == 0xFFFF) return true;
  for (i64 g = 0; g < groups; ++g) {
    for (i64 q = 0; q < kWidth; ++q) {
      const int32_t value = scale[q * kStripGroups + g];
      if (value >= least && value <= most) continue;
      for (i64 i = 0; i < kGroup; ++i) {
        if (w[g].codes[i / 4 * kStepBytes + 4 * q + i % 4] != offset) return false;
      }
      if (value == 255) return false;
      w[g].powers[q] = kBias << 23;
    }
  }
  return true;
}

}  // namespace

#endif
