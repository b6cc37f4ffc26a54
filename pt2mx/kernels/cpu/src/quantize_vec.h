// Quantizes blocks of values that another kernel has in registers, rounding to nearest even, to the same bits as
// quantize.cpp.

#pragma once

#include "values.h"

namespace {

// Bounds of a block's amax between which its scale and its quantized values are normal numbers.
constexpr int32_t kLeastUsual = (kBias - 60) << 23, kMostUsual = (kBias + 90) << 23;

inline int32_t largest_lane(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(__m512i(v));
#elif defined(__AVX2__)
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(__m256i(v)), _mm256_extracti128_si256(__m256i(v), 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return std::max(_mm_cvtsi128_si32(half), _mm_extract_epi32(half, 1));
#else
  int32_t lanes[kWidth], largest = 0;
  store(lanes, v);
#pragma omp simd reduction(max : largest)
  for (i64 i = 0; i < kWidth; ++i) largest = std::max(largest, lanes[i]);
  return largest;
#endif
}

class VecQuantizer {
 public:
  // out_dtype: in which the values will be stored.
  VecQuantizer(const Spec& spec, int32_t out_dtype)
      : spec_(&spec),
        dtype_(out_dtype),
        is_int_(spec.is_int),
        rounding_(kMantissa - spec.threshold),
        emax_(spec.emax * (1 << 23)),
        emin_(spec.emin * (1 << 23)),
        to_rounder_(ints((23 - spec.mantissa_bits) << 23 | 1 << 22)),
        rounder_(std::ldexp(1.5f, spec.emin - spec.mantissa_bits + 23)) {}

  // True for blocks along rows of n values that this class quantizes. In a narrow format the smallest binade of a usual
  // block has normal numbers.
  static bool supports(const Spec& spec, i64 block, i64 n) {
    const bool is_narrow = spec.emax - spec.emin < 60;
    return is_narrow && !spec.float_scale && spec.rounding == EVEN && !spec.searches && (block % 16 == 0 || block == n);
  }

  // v: the vectors of a block, padded with zeros -> its quantized values, which out_dtype represents.
  inline __attribute__((always_inline)) void quantize(Floats* v, i64 vectors) const {
    Ints amax_lanes{};
    for (i64 i = 0; i < vectors; ++i) amax_lanes = larger(amax_lanes, Ints(v[i]) & kMagnitude);
    const int32_t amax = largest_lane(amax_lanes);
    if (amax != 0 && u32(amax - kLeastUsual) >= u32(kMostUsual - kLeastUsual)) {
      for (i64 i = 0; i < vectors; ++i) v[i] = unusual(v[i], amax, *spec_, dtype_);
      return;
    }
    // A mantissa above the threshold carries into the exponent. Any scale suits a block of zeros.
    const int32_t exponent = ((std::max(amax, kLeastUsual) + rounding_) & kInf) - emax_;
    const float scale = from_bits(exponent);
    const Floats highest = floats(scale * spec_->max_normal), lowest = floats(scale * spec_->lowest);
    if (is_int_) {
      const Floats rounder = floats(scale * rounder_);
      for (i64 i = 0; i < vectors; ++i) v[i] = larger(smaller((v[i] + rounder) - rounder, highest), lowest);
      return;
    }
    const Ints least = ints(exponent + emin_);
    for (i64 i = 0; i < vectors; ++i) {
      const Floats rounder = Floats(larger(Ints(v[i]) & kInf, least) + to_rounder_);
      const Floats p = larger(smaller((v[i] + rounder) - rounder, highest), lowest);
      v[i] = Floats(Ints(p) | (Ints(v[i]) & kSign));
    }
  }

 private:
  // Quantizes values if they or their scale are subnormal or out of range; rounds to out_dtype.
  static NOINLINE Floats unusual(Floats v, int32_t amax, const Spec& spec, int32_t dtype) {
    const int32_t exponent = exponent_of(amax, spec);
    const Floats in = floats(std::ldexp(1.0f, -exponent));
    const Floats out = floats(amax < kInf ? std::ldexp(1.0f, exponent) : from_bits(0x7FC00000));
    return rounded(to_element<EVEN>(v * in, Grid(spec), nullptr) * out, dtype);
  }

  const Spec* spec_;
  int32_t dtype_, is_int_, rounding_, emax_, emin_;
  Ints to_rounder_;  // added to a binade's bits, gives 1.5 * 2**23 quanta; adding and subtracting these rounds
  float rounder_;    // the same, for integers
};

}  // namespace
