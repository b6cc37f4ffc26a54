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

// Decodes the groups [begin, end) of kNR rows of the weight from `row` on to w: (end - begin, 2, kTileRows, kGroup).
// Rows past the last one repeat it. The scale of a tensor is left to `result_factor`. Returns true if a weight is
// subnormal, which matrix instructions take for zero.
template <class Decoder, bool kFloatScale>
bool decode_chunk(const LinearCall& c, Decoder& decoder, i64 row, i64 begin, i64 end, u16* w) {
  __mmask16 subnormal = 0;
  for (i64 q = 0; q < kNR; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    const u8* codes = c.data + at * c.row_bytes + begin * Decoder::kBytes;
    u8 padded[Decoder::kBytes];
    HalfFactors halves[kChunkGroups];
    Scales scales;
    if (kFloatScale) {
      set_half_factors(c, at, begin, end, 1, Decoder::kShift, halves);
    } else {
      scales.set(c.scale + at * c.row_blocks, c.block / kGroup, begin, end, Decoder::kShift);
      if (!scales.ordinary) scales.split(c.scale + at * c.row_blocks, c.block / kGroup, begin, end, Decoder::kShift);
    }
    u16* out = w + q * kGroup;
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
