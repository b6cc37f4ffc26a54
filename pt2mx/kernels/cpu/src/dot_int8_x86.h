// AVX2, AVX-512 and VNNI for dot_int8.h: what its loop does to a vector of kWidth sums, four codes each.

#pragma once

#include <type_traits>

#include "int8_microkernel.h"

#if defined(PT2MX_HAVE_INT8)
#define PT2MX_HAVE_DOT_INT8

namespace {

constexpr int32_t kLeastIsa = VPMADDUBSW;  // which every processor has that runs these kernels

// Calls body(isa) with the instruction as a constant.
template <class Body>
auto with_dot_isa(UNUSED int32_t isa, Body body) {
#if defined(PT2MX_HAVE_VNNI)  // an older assembler lacks the instruction
#if defined(__AVX512BW__)
  if (isa & VPERMB) return body(std::integral_constant<int, VPDPBUSD | VPERMB>());
#endif
  if (isa & VPDPBUSD) return body(std::integral_constant<int, VPDPBUSD>());
#endif
  return body(std::integral_constant<int, VPMADDUBSW>());
}

inline Bytes each_byte(u8 byte) { return VECTOR(set1_epi8)(char(byte)); }
inline Floats to_floats(Bytes sums) { return Floats(VECTOR(cvtepi32_ps)(sums)); }

// Writes the codes of a group at even and at odd positions.
inline void split_even_odd(const u8* codes, u8* even, u8* odd) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m256i parts = _mm256_shuffle_epi8(load256(codes), _mm256_broadcastsi128_si256(order));
  const __m256i halves = _mm256_permute4x64_epi64(parts, 0xD8);
  store(even, _mm256_castsi256_si128(halves));
  store(odd, _mm256_extracti128_si256(halves, 1));
}

// sum: plus the products of codes of the weight, as many vectors as x has, 4 * kLanes codes apart.
template <class Columns, int kIsa>
inline __attribute__((always_inline)) Bytes dot(Bytes sum, const Bytes* w, const u8* x) {
  constexpr int kVectors = Columns::kRowVectors;
  const Bytes ones = VECTOR(set1_epi16)(1);
  Bytes wide{}, upper{};
  for (int v = 0; v < kVectors; ++v) {
    const Bytes values = load<Bytes>(x + v * 4 * kLanes);
    if constexpr (kIsa & VPDPBUSD) {
      dpbusd(sum, w[v], values);
    } else if constexpr (Columns::kWideSums >= kVectors) {
      wide = VECTOR(add_epi16)(wide, VECTOR(maddubs_epi16)(w[v], values));
    } else {  // the lower seven bits of a code, and the eighth
      const Bytes eighth = VECTOR(srli_epi16)(w[v], 7) & VECTOR(set1_epi8)(1);
      wide = VECTOR(maddubs_epi16)(w[v] & VECTOR(set1_epi8)(127), values);
      upper = VECTOR(madd_epi16)(VECTOR(maddubs_epi16)(eighth, values), VECTOR(set1_epi16)(128));
      sum = VECTOR(add_epi32)(sum, upper);
    }
  }
  return kIsa & VPDPBUSD ? sum : VECTOR(add_epi32)(sum, VECTOR(madd_epi16)(wide, ones));
}

// Reads the scales of a vector's sums. kGroupLanes adjacent sums belong to one group.
template <i64 kGroupLanes>
class LaneScales {
 public:
  LaneScales() {
    alignas(64) u8 order[4 * kWidth];  // of scales, which move to the top of their lanes
    for (i64 i = 0; i < 4 * kWidth; ++i) order[i] = i % 4 == 3 ? u8(i / 4 / kGroupLanes) : 0x80;
    to_top_ = load<Bytes>(order);
  }
  // Returns powers of two, as bits of floats. Reads 4 bytes.
  Ints powers(const u8* scale) const {
    const Bytes bytes = VECTOR(set1_epi32)(load<int32_t>(scale));
    return Ints(VECTOR(srli_epi32)(VECTOR(shuffle_epi8)(bytes, to_top_), 1));
  }

 private:
  Bytes to_top_;
};

// Writes the sums of the lanes of kDotTile rows, `stride` vectors apart: adds halves of the lanes until one is left.
inline void sum_lanes(const Floats* totals, i64 stride, float* y) {
#if defined(__AVX512BW__)
  const auto halves = [](__m512 a, __m512 b) {  // of both
    return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE);
  };
  const __m512 two = halves(totals[0], totals[stride]), others = halves(totals[2 * stride], totals[3 * stride]);
  __m512 sums = _mm512_shuffle_f32x4(two, others, 0x88) + _mm512_shuffle_f32x4(two, others, 0xDD);  // four of a row
  sums += _mm512_permute_ps(sums, 0x4E);
  sums += _mm512_permute_ps(sums, 0xB1);
  _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
#else
  __m128 row[kDotTile];
  for (int q = 0; q < kDotTile; ++q, totals += stride) {
    const __m256 half = __m256(totals[0] + totals[1]);
    row[q] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  const __m128 low = _mm_add_ps(_mm_unpacklo_ps(row[0], row[1]), _mm_unpackhi_ps(row[0], row[1]));
  const __m128 high = _mm_add_ps(_mm_unpacklo_ps(row[2], row[3]), _mm_unpackhi_ps(row[2], row[3]));
  _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
#endif
}

}  // namespace

#endif
