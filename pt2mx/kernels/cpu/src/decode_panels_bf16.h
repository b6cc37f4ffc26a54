// Codes of 4 bits decoded to bfloat16 in the layout of panels of B, for gemm_bf16.h. A byte has two codes, which are
// adjacent in k, as an instruction multiplies them. So bytes are transposed, which takes an eighth of the time of
// transposing values.

#pragma once

#include <algorithm>

#include "decode_bf16.h"
#include "gemm_microkernel.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

// Other decoders write rows, which the caller transposes.
template <class Decoder>
struct PanelDecoder {
  explicit PanelDecoder(const LinearCall&) {}
  bool decode(const LinearCall&, i64, i64, i64, u16*) { return false; }
  i64 min_exponent() const { return 2 * kBias; }
};

// Looks up values times 2**lift, the largest that has a finite product, and subtracts from their exponents. A
// saturating subtraction keeps zero. -0 becomes 0, which changes no sum.
template <>
struct PanelDecoder<Nibbles> {
  explicit PanelDecoder(const LinearCall& c) : e8m0_(!c.float_scale && has_avx512_vbmi()) {
    u16 values[16], least = 0x7FFF, most = 0;
    for (int i = 0; i < 16; ++i) {
      values[i] = u16(bits_of(c.table[i]) >> 16);
      const u16 magnitude = values[i] & 0x7FFF;
      if (!magnitude) continue;
      least = std::min(least, magnitude);
      most = std::max(most, magnitude);
    }
    least_exponent_ = least >> 7;
    const i64 lift = 2 * kBias - (most >> 7);
    highest_ = kBias + lift;
    lowest_ = kBias + 1 - least_exponent_;
    for (int i = 0; i < 32; ++i) table_[i] = values[i % 16] & 0x7FFF ? u16(values[i % 16] + (lift << 7)) : u16(0);
    for (int i = 0; i < 64; ++i) {
      scale_order_[i] = u8(i % kTileRows * kChunkGroups + i / kTileRows);
      code_order_[i] = u8(i % 4 * kTileRows + i / 4);
      lane_[i] = u8(i / 4);
    }
  }

  // Decodes `count` groups, up to kChunkGroups, of kNR rows of the weight, from `row` and `begin` on, to w: (count, 2,
  // kTileRows pairs, kTileRows columns, 2). Rows past the last one repeat it. Returns false, and writes nothing, if a
  // value could be subnormal or out of range, if the last group is partial, or if scales have a significand.
  bool decode(const LinearCall& c, i64 row, i64 begin, i64 count, u16* w) {
    if (!e8m0_ || (begin + count) * kGroup > c.k) return false;
    const u8* codes[kNR];
    alignas(64) u8 scales[kNR][kChunkGroups];
    for (i64 q = 0; q < kNR; ++q) {
      const i64 at = std::min(row + q, c.n - 1);
      codes[q] = c.data + at * c.row_bytes + begin * Nibbles::kBytes;
      for (i64 b = 0; b < count * Nibbles::kBytes; b += 64) __builtin_prefetch(codes[q] + kNR * c.row_bytes + b);
      u8 expanded[kChunkGroups];
      const u8* bytes = scales_of_groups(c.scale + at * c.row_blocks, c.block / kGroup, begin, begin + count, expanded);
      std::memset(scales[q], bytes[0], kChunkGroups);
      std::memcpy(scales[q], bytes, count);
    }
    const ByteRange range(scales[0], kNR * kChunkGroups);
    if (!range.is_within(lowest_, highest_)) return false;
    least_scale_ = std::min<i64>(least_scale_, range.min);
    for (i64 h = 0; h < 2; ++h) decode_tiles(codes + h * kTileRows, scales[h * kTileRows], count, w + h * kTileElems);
    return true;
  }

  // As `min_exponent_of` of the decoded values, or less.
  i64 min_exponent() const { return least_exponent_ + least_scale_ - kBias; }

 private:
  // Decodes kTileRows columns. scales: (kTileRows, kChunkGroups).
  __attribute__((target("avx512vbmi"))) NOINLINE void decode_tiles(const u8* const* codes, const u8* scales, i64 count,
                                                                   u16* w) const {
    alignas(64) u8 of_groups[kChunkGroups][kTileRows];
    const __m512i scales_low = _mm512_load_si512(scales), scales_high = _mm512_load_si512(scales + 64);
    const __m512i first_groups = _mm512_load_si512(scale_order_);
    for (int half = 0; half < 2; ++half) {
      const __m512i from = _mm512_add_epi8(first_groups, _mm512_set1_epi8(char(half * kChunkGroups / 2)));
      _mm512_store_si512(of_groups[half * kChunkGroups / 2], _mm512_permutex2var_epi8(scales_low, from, scales_high));
    }
    const __m512i table = _mm512_load_si512(table_), transposed = _mm512_load_si512(code_order_);
    const __m512i high_nibbles = _mm512_set1_epi32(4 << 16);
    __m512i lanes[4];  // each byte of a lane, four times
    for (int i = 0; i < 4; ++i) {
      lanes[i] = _mm512_add_epi8(_mm512_load_si512(lane_), _mm512_set1_epi8(char(i * kTileRows)));
    }
    for (i64 g = 0; g < count; ++g, w += kMicroGroup) {
      __m512i columns[4];  // then (16 pairs, 4 columns)
      for (int i = 0; i < 4; ++i) {
        const u8* const* from = codes + 4 * i;
        const i64 at = g * Nibbles::kBytes;
        const __m256i low =
            _mm256_inserti128_si256(_mm256_castsi128_si256(load128(from[0] + at)), load128(from[1] + at), 1);
        const __m256i high =
            _mm256_inserti128_si256(_mm256_castsi128_si256(load128(from[2] + at)), load128(from[3] + at), 1);
        columns[i] = _mm512_permutexvar_epi8(transposed, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
      }
      const __m512i low01 = _mm512_unpacklo_epi32(columns[0], columns[1]);
      const __m512i high01 = _mm512_unpackhi_epi32(columns[0], columns[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(columns[2], columns[3]);
      const __m512i high23 = _mm512_unpackhi_epi32(columns[2], columns[3]);
      // lane i of pairs[j]: pair 4 * i + j of 16 columns
      const __m512i pairs[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                                _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
      const __m512i below =
          _mm512_sub_epi32(_mm512_set1_epi32(int32_t(highest_)), _mm512_cvtepu8_epi32(load128(of_groups[g])));
      const __m512i down = _mm512_or_si512(_mm512_slli_epi32(below, 7), _mm512_slli_epi32(below, 23));
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          const __m512i code = _mm512_srlv_epi16(_mm512_permutexvar_epi8(lanes[i], pairs[j]), high_nibbles);
          // a look-up takes five bits: the table has the 16 values twice
          const __m512i values = _mm512_subs_epu16(_mm512_permutexvar_epi16(code, table), down);
          _mm512_store_si512(w + (4 * i + j) * kGroup, values);
        }
      }
    }
  }

  const bool e8m0_;
  alignas(64) u16 table_[32];
  alignas(64) u8 scale_order_[64],
      code_order_[64], lane_[64];          // byte i of a vector comes from byte order[i] of another
  i64 least_exponent_, lowest_, highest_;  // of values of the table; of scales
  i64 least_scale_ = 255;
};

}  // namespace

#endif
