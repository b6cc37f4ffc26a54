// Rows of a packed weight decoded to bfloat16, which is exact, for the kernels that multiply bfloat16 values.

#pragma once

#include "isa.h"
#include "linear.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kChunkGroups = 8;  // groups decoded at a time: a chunk of both operands fits the first-level cache

// The 32 values of a group in their order, from two vectors of a decoder: even and odd values, or the two halves.
template <bool EvenOdd>
inline Ints to_bf16(Ints first, Ints second) {
  if (EvenOdd) return (second & int32_t(0xFFFF0000)) | ((first >> 16) & 0xFFFF);
  const __m256i low = _mm512_cvtepi32_epi16(__m512i(first >> 16)), high = _mm512_cvtepi32_epi16(__m512i(second >> 16));
  return Ints(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// Decodes codes of 4 bits to bfloat16 by a table that holds values times the scale of the group: adding to the
// exponents of the table scales 16 values at once. Other decoders have no such table.
template <class Decoder>
struct ScaledTable {
  static constexpr bool kSupported = false;
  explicit ScaledTable(const LinearCall&) {}
};

template <>
struct ScaledTable<Nibbles> {
  static constexpr bool kSupported = true;
  __m512i table;      // 16 values, twice, because a look-up takes five bits
  __mmask32 nonzero;  // zeros have no exponent

  explicit ScaledTable(const LinearCall& c) {
    u16 values[32];
    for (int i = 0; i < 32; ++i) values[i] = u16(bits_of(c.table[i % 16]) >> 16);
    table = _mm512_loadu_si512(values);
    nonzero = _mm512_test_epi16_mask(table, _mm512_set1_epi16(0x7FFF));
  }

  // Decodes kChunkGroups whole groups of kNR rows, from `begin` on, as decode_chunk does. Returns false if a value
  // could be subnormal or out of range, and is wrong: values of the table are from 2**-24 to 2**8.
  NOINLINE bool decode_rows(const LinearCall& c, i64 row, i64 begin, u16* w) const {
    const __m512i values = table;
    const __m512i spread = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)),
        _mm512_set_epi32(0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x08080808, 0x08080808, 0x08080808, 0x08080808,
                         0x04040404, 0x04040404, 0x04040404, 0x04040404, 0, 0, 0, 0));
    const __m512i shifts = _mm512_set1_epi32(4 << 16);
    const __mmask32 mask = nonzero;
    __m128i least = _mm_set1_epi8(-1), most = _mm_setzero_si128();
    for (i64 q = 0; q < kNR; ++q, w += kGroup) {
      const i64 at = std::min(row + q, c.n - 1);
      const u8* codes = c.data + at * c.row_bytes + begin * Nibbles::kBytes;
      u8 expanded[kChunk];
      const u8* scales =
          scales_of_groups(c.scale + at * c.row_blocks, c.block / kGroup, begin, begin + kChunkGroups, expanded);
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
      least = _mm_min_epu8(least, bytes);
      most = _mm_max_epu8(most, bytes);
      const __m256i scale = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(kBias));
      int32_t exponents[kChunkGroups];  // of two values
      store(exponents,
            _mm256_or_si256(_mm256_slli_epi32(scale, 23), _mm256_srli_epi32(_mm256_slli_epi32(scale, 23), 16)));
      for (i64 b = 0; b < kChunkGroups * Nibbles::kBytes; b += 64) __builtin_prefetch(codes + kNR * c.row_bytes + b);
      for (i64 i = 0; i < kChunkGroups; ++i) {
        const __m512i pairs = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(codes + i * Nibbles::kBytes)), spread);
        const __m512i scaled = _mm512_mask_add_epi16(values, mask, values, _mm512_set1_epi32(exponents[i]));
        store(w + i * 2 * kTileElems, _mm512_permutexvar_epi16(_mm512_srlv_epi16(pairs, shifts), scaled));
      }
    }
    const __m128i usual = _mm_and_si128(_mm_cmpeq_epi8(_mm_max_epu8(least, _mm_set1_epi8(25)), least),
                                        _mm_cmpeq_epi8(_mm_min_epu8(most, _mm_set1_epi8(char(245))), most));
    return !(~_mm_movemask_epi8(usual) & 0xFF);
  }
};

// Decodes the groups [begin, end) of kNR rows of the weight from `row` on to w: (end - begin, 2, kTileRows, kGroup).
// Rows past the last one repeat it. The scale of a tensor is left to `result_factor`. Returns true if a weight is
// subnormal, which matrix instructions take for zero.
template <class Decoder, bool kFloatScale>
bool decode_chunk(const LinearCall& c, Decoder& decoder, i64 row, i64 begin, i64 end, u16* w) {
  if constexpr (ScaledTable<Decoder>::kSupported && !kFloatScale) {
    const bool whole = end - begin == kChunkGroups && end * kGroup <= c.k;
    if (whole && ScaledTable<Decoder>(c).decode_rows(c, row, begin, w)) return false;
  }
  const i64 per_block = c.block / kGroup;
  __mmask16 subnormal = 0;
  for (i64 q = 0; q < kNR; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    const u8* codes = c.data + at * c.row_bytes + begin * Decoder::kBytes;
    const u8* scale = c.scale + at * c.row_blocks;
    u16* out = w + q * kGroup;
    u8 padded[Decoder::kBytes];
    HalfFactors halves[kChunkGroups];
    Scales scales;
    if (kFloatScale) {
      set_half_factors(c, at, begin, end, 1, Decoder::kShift, halves);
    } else {
      scales.set(scale, per_block, begin, end, Decoder::kShift);
      if (!scales.ordinary) scales.split(scale, per_block, begin, end, Decoder::kShift);
    }
    for (i64 i = 0; i < end - begin; ++i, codes += Decoder::kBytes, out += 2 * kTileElems) {
      Floats values[kVectors];
      if ((begin + i + 1) * kGroup > c.k) codes = last_group<Decoder>(c, at, padded);
      if (!kFloatScale && scales.ordinary) {
        decoder.decode(codes, scales.one[i], values);
      } else {
        if (kFloatScale) decoder.decode(codes, halves[i], values);
        else decoder.decode(codes, scales.two[i], values);
        for (int v = 0; v < kVectors; ++v) subnormal |= _mm512_fpclass_ps_mask(__m512(values[v]), 0x20);
      }
      __builtin_prefetch(codes + kNR * c.row_bytes);
      store(out, to_bf16<Decoder::kEvenOdd>(Ints(values[0]), Ints(values[1])));
    }
  }
  return subnormal;
}

template <class Decoder>
bool decode_chunk(const LinearCall& c, Decoder& decoder, i64 row, i64 begin, i64 end, u16* w) {
  return (c.float_scale ? decode_chunk<Decoder, true> : decode_chunk<Decoder, false>)(c, decoder, row, begin, end, w);
}

}  // namespace

#endif
