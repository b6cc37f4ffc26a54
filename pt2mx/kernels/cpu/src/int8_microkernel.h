// Sums of a strip of groups of integers, for linear_int8.h: by vpmaddubsw of AVX2 and AVX-512, or by vpdpbusd of
// AVX_VNNI and AVX512_VNNI. Sums of a group are exact, and one multiply-add a group applies both scales.

#pragma once

#include "int8_columns.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

// ---- sums of a strip: totals: (R, kWidth) += x: R rows of `groups` groups, times w: (groups) ----

// strip += the sums of a group times its powers of two.
template <int R>
inline __attribute__((always_inline)) void add_group(const Bytes* sums, const GroupColumns& w,
                                                     const CodeGroup* const* x, i64 g, Floats* strip) {
  const Ints powers = load<Ints>(w.powers);
  for (int r = 0; r < R; ++r) {
    strip[r] = fused(Floats(VECTOR(cvtepi32_ps)(sums[r])), Floats(powers + x[r][g].power), strip[r]);
  }
}

// By vpdpbusd, or by vpmaddubsw, which adds two products in 16 bits.
template <int kIsa, int kWideSums, int R>
NOINLINE void multiply_strip(const GroupColumns* w, i64 groups, const CodeGroup* const* x, float* totals) {
  constexpr int kInner = std::max(kWideSums, 1);
  const Bytes ones = VECTOR(set1_epi16)(1);
  Floats strip[R] = {};
  for (i64 g = 0; g < groups; ++g) {
    Bytes sums[R], upper[R] = {};
    for (int r = 0; r < R; ++r) sums[r] = VECTOR(set1_epi32)(x[r][g].offset);
    for (int s = 0; s < kSteps; s += kInner) {
      Bytes wide[R] = {};
      for (int i = s; i < s + kInner; ++i) {
        const Bytes codes = load<Bytes>(w[g].codes + i * kStepBytes);
        for (int r = 0; r < R; ++r) {
          const Bytes values = VECTOR(set1_epi32)(load<int32_t>(x[r][g].codes + 4 * i));
          if (kIsa == VPDPBUSD) {
            dpbusd(sums[r], codes, values);
          } else if (kWideSums) {
            wide[r] = VECTOR(add_epi16)(wide[r], VECTOR(maddubs_epi16)(codes, values));
          } else {  // the lower seven bits of a code, and the eighth
            wide[r] = VECTOR(maddubs_epi16)(codes & VECTOR(set1_epi8)(127), values);
            const Bytes eighth = VECTOR(srli_epi16)(codes, 7) & VECTOR(set1_epi8)(1);
            upper[r] = VECTOR(add_epi16)(upper[r], VECTOR(maddubs_epi16)(eighth, values));
          }
        }
      }
      for (int r = 0; r < R && kIsa != VPDPBUSD; ++r) {
        sums[r] = VECTOR(add_epi32)(sums[r], VECTOR(madd_epi16)(wide[r], ones));
      }
    }
    for (int r = 0; r < R && kIsa != VPDPBUSD && !kWideSums; ++r) {
      sums[r] = VECTOR(add_epi32)(sums[r], VECTOR(madd_epi16)(upper[r], VECTOR(set1_epi16)(128)));
    }
    add_group<R>(sums, w[g], x, g, strip);
  }
  for (int r = 0; r < R; ++r) store(totals + r * kWidth, load<Floats>(totals + r * kWidth) + strip[r]);
}

inline bool has_vnni() {
#if !defined(PT2MX_HAVE_VNNI)
  return false;
#elif defined(__AVX512BW__)
  return has_avx512_vnni();
#else
  static const bool available = Cpuid(1).a >> 4 & 1;
  return available;
#endif
}

using MultiplyStrip = void (*)(const GroupColumns*, i64, const CodeGroup* const*, float*);

// The kernels for one, two, four and eight rows of x.
template <int kWideSums>
const MultiplyStrip* strip_kernels(int32_t isa) {
#if defined(PT2MX_HAVE_VNNI)
  static constexpr MultiplyStrip vnni[] = {multiply_strip<VPDPBUSD, 0, 1>, multiply_strip<VPDPBUSD, 0, 2>,
                                           multiply_strip<VPDPBUSD, 0, 4>, multiply_strip<VPDPBUSD, 0, 8>};
  if (isa & VPDPBUSD) return vnni;
#endif
  static constexpr MultiplyStrip plain[] = {
      multiply_strip<VPMADDUBSW, kWideSums, 1>, multiply_strip<VPMADDUBSW, kWideSums, 2>,
      multiply_strip<VPMADDUBSW, kWideSums, 4>, multiply_strip<VPMADDUBSW, kWideSums, 8>};
  return plain;
}

// Bits of IntegerIsa that a weight with these values can use.
template <class Decoder>
int32_t integer_isa_for(const float* table) {
  using Columns = IntegerColumns<Decoder>;
  const Columns columns(table);
  if (columns.shift == 8) return 0;
  const int32_t more = (has_amx_int8() ? TDPBSSD : 0) | (has_avx512_vbmi() ? VPERMB : 0);
  return (columns.fits(std::max(Columns::kWideSums, 1)) ? VPMADDUBSW : 0) | (has_vnni() ? VPDPBUSD | more : 0);
}

}  // namespace

#endif
