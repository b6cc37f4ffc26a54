// Rounds values to an element's grid, encodes and decodes them: the steps of pt2mx/kernels/reference.py, a vector at a
// time. quantize.cpp supplies the values and the factors of their blocks.

#pragma once

#include <cmath>
#include <type_traits>

#include "floats.h"

namespace {

// In the order of `ROUNDINGS` in pt2mx/modes.py.
enum Rounding { EVEN, HALF_AWAY, HALF_TOWARD_ZERO, HALF_UP, TOWARD_ZERO, UP, DOWN, STOCHASTIC };

constexpr int32_t kNotFinite = 128;  // the exponent of a block with an Inf or a NaN: byte 255 of E8M0
constexpr float kSmallestNormal = 0x1p-126f;

inline int32_t clamp_exponent(int32_t exponent) { return std::min(std::max(exponent, -127), 127); }

// Returns the shared exponent of a block with this amax, the bits of a float.
inline int32_t exponent_of(int32_t amax, const Spec& s) {
  const int32_t mantissa = amax & kMantissa, subnormal_threshold = (s.threshold + kMantissa + 1) >> 1;
  const int32_t round_up = mantissa > (amax == mantissa ? subnormal_threshold : s.threshold);
  const int32_t exponent = clamp_exponent((amax >> 23) - kBias + round_up - s.emax);
  return amax < kInf ? exponent : kNotFinite;
}

// ---- a vector of values ----

// `smaller` and `larger` return b if a is NaN.
template <class V>
inline V smaller(V a, V b) {
  return a < b ? a : b;
}
template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
#if defined(__AVX512F__)  // the same as above, for which GCC may generate a comparison and a blend
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
#endif
inline Floats magnitude(Floats x) { return Floats(Ints(x) & kMagnitude); }
inline Floats one_if(Ints condition) { return Floats(condition & int32_t(0x3F800000)); }

// An element format in registers, for the loops.
struct Grid {
  int32_t code_shift, sign_bit, code_mask;
  Ints lowest_binade, highest_binade, mantissa, max_code, full_range, negate;
  Floats highest, lowest, zero;

  explicit Grid(const Spec& s)
      : code_shift(23 - s.mantissa_bits),
        sign_bit(s.is_int ? 0 : 1 << (s.bits - 1)),
        code_mask((1 << s.bits) - 1),
        lowest_binade(ints((s.emin + kBias) << 23)),
        highest_binade(ints((s.emax + kBias) << 23)),
        mantissa(ints(s.mantissa_bits << 23)),
        max_code(ints(s.max_code)),
        full_range(ints(s.full_range)),
        negate(ints(s.is_int ? -1 : 0)),
        highest(floats(s.max_normal)),
        lowest(floats(s.lowest)),
        zero(Floats(ints(s.is_int ? 0 : kSign))) {}  // adding it turns -0 of an integer into 0, and changes no float
};

template <bool D>
inline Floats times_factors(Floats x, Floats in0, Floats in1) {
  return (D ? x / in0 : x * in0) * in1;
}

template <int R, bool D>
inline Floats to_units(Floats x, Floats in0, Floats in1) {  // x over the block's scale
  const Floats v = times_factors<D>(x, in0, in1);
  if (R != UP && R != DOWN) return v;
  // Directed roundings depend on any nonzero value, however small: it must not become zero.
  const Ints lost = (magnitude(v) < kSmallestNormal) & (x != 0.0f);
  return lost ? Floats((Ints(x) & kSign) | 1 << 23) : v;
}

template <int R>
inline Floats to_quanta(Floats units, Ints sign, const u32* random) {
  const Floats nearest = (units + 0x1p23f) - 0x1p23f;  // ties to even
  const Floats floor = nearest - one_if(nearest > units), fraction = units - floor;
  switch (R) {
    case EVEN: return nearest;
    case HALF_AWAY: return floor + one_if(fraction >= 0.5f);
    case HALF_TOWARD_ZERO: return floor + one_if(fraction > 0.5f);
    case HALF_UP: return floor + one_if((fraction > 0.5f) | ((fraction == 0.5f) & ~sign));
    case UP: return floor + one_if((fraction > 0.0f) & ~sign);
    case DOWN: return floor + one_if((fraction > 0.0f) & sign);
    case STOCHASTIC: return floor + one_if(load<Ints>(random) < __builtin_convertvector(fraction * 0x1p31f, Ints));
    default: return floor;
  }
}

inline Ints binade_of(Floats v, const Grid& g) {
  return smaller(larger(Ints(v) & kInf, g.lowest_binade), g.highest_binade);
}

// Returns the power of two in whose binade a unit in the last place is one quantum: adding it rounds, ties to even.
inline Floats rounder(Ints binade, const Grid& g) { return Floats(binade + (g.code_shift << 23)); }

template <int R>
inline Floats quanta_of(Floats v, Ints binade, const Grid& g, const u32* random) {
  Floats units = magnitude(v) * Floats((2 * kBias << 23) - (binade - g.mantissa));
  if (R == STOCHASTIC) units = smaller(units, floats(0x1p22f));  // a NaN has no integer
  return to_quanta<R>(units, Ints(v) >> 31, random);
}

template <int R>
inline Floats to_element(Floats v, const Grid& g, const u32* random) {
  const Ints binade = binade_of(v, g);
  const Floats p = R == EVEN ? (magnitude(v) + rounder(binade, g)) - rounder(binade, g)
                             : quanta_of<R>(v, binade, g, random) * Floats(binade - g.mantissa);
  const Floats with_sign = Floats(Ints(p) | (Ints(v) & kSign)) + g.zero;
  return larger(smaller(with_sign, g.highest), g.lowest);
}

template <int R>
inline Ints to_code(Floats v, const Grid& g, const u32* random) {
  const Ints binade = binade_of(v, g);
  const Ints quanta = R == EVEN
                          ? Ints(magnitude(v) + rounder(binade, g)) - Ints(rounder(binade, g))
                          : __builtin_convertvector(smaller(quanta_of<R>(v, binade, g, random), floats(512.0f)), Ints);
  const Ints sign = Ints(v) >> 31, negate = sign & g.negate;
  // the quanta of a normal number include its hidden bit, which counts as one binade
  Ints code = ((binade - g.lowest_binade) >> g.code_shift) + quanta;
  code = smaller(code, g.max_code + (sign & g.full_range));
  return (((code ^ negate) - negate) | (sign & g.sign_bit)) & g.code_mask;
}

// ---- a chunk of values ----

// What multiplies the values of a block before and after rounding, two factors each. Of E8M0 scales they are powers of
// two: one alone could be subnormal or out of range. Of other scales in0 is the scale, which divides or multiplies,
// out1 is the scale, and the others make up for the unit of integers. out1 is NaN if the block has an Inf or a NaN.
struct Factors {
  const float *in0, *in1, *out0, *out1;
};

// All arrays have room up to a multiple of kWidth.
struct Chunk {
  const float* x;
  i64 n;
  Factors f;
  i64 run;         // values that share a factor, a multiple of kLanes; 0: each has its own
  const u8* next;  // memory that the next tile reads, `next_bytes` for each value: it is prefetched
  i64 next_bytes;
  const u32* random;
  int32_t* scratch;
};

// Calls body(i, in0, in1, out0, out1) for each vector; i is its first value.
template <class Body>
inline void each_vector(const Chunk& c, Body body) {
  const Factors f = c.f;
  const i64 n = c.n;
  if (c.run == 0) {
    for (i64 i = 0; i < n; i += kWidth) {
      body(i, load<Floats>(f.in0 + i), load<Floats>(f.in1 + i), load<Floats>(f.out0 + i), load<Floats>(f.out1 + i));
    }
    return;
  }
  for (i64 i = 0, k = 0; i < n; ++k) {
    const Floats in0 = floats(f.in0[k]), in1 = floats(f.in1[k]), out0 = floats(f.out0[k]), out1 = floats(f.out1[k]);
    for (const i64 end = std::min(i + c.run, n); i < end; i += kWidth) body(i, in0, in1, out0, out1);
  }
}

#define BODY \
  (i64 i, UNUSED Floats in0, UNUSED Floats in1, UNUSED Floats out0, UNUSED Floats out1) __attribute__((always_inline))

template <int R, bool D>
NOINLINE void to_values(const Chunk& c, const Spec& spec, float* out) {
  const Grid g(spec);
  const float* x = c.x;
  const u32* random = c.random;
  const u8* next = c.next;
  const i64 next_bytes = c.next_bytes;
  each_vector(c, [=] BODY {
    const Floats v = to_units<R, D>(load<Floats>(x + i), in0, in1);
    __builtin_prefetch(next + i * next_bytes);
    store(out + i, to_element<R>(v, g, random + i) * out0 * out1);
  });
}

// Converts between bytes and 32-bit integers in a separate loop, because GCC 12 handles vectors of bytes lane by lane.
template <class From, class To>
NOINLINE void convert(const From* from, i64 n, To* to) {
#pragma omp simd
  for (i64 i = 0; i < n; ++i) to[i] = To(from[i]);
}

template <int R, bool D>
NOINLINE void to_codes(const Chunk& c, const Spec& spec, u8* codes) {
  const Grid g(spec);
  const float* x = c.x;
  int32_t* out = c.scratch;
  const u32* random = c.random;
  const u8* next = c.next;
  const i64 next_bytes = c.next_bytes;
  each_vector(c, [=] BODY {
    __builtin_prefetch(next + i * next_bytes);
    const Ints code = to_code<R>(to_units<R, D>(load<Floats>(x + i), in0, in1), g, random + i);
    store(out + i, code & (out1 == out1));
  });
  convert(out, c.n, codes);
}

// Measures rounding errors as reference._least_squares does: in whole numbers, so that sums do not depend on the order.
template <int R, bool D>
NOINLINE void to_errors(const Chunk& c, const Spec& spec, int32_t* out) {
  const Grid g(spec);
  const float* x = c.x;
  const Floats limit = floats(std::ldexp(1.0f, spec.error_bits));
  const Floats unit = floats(std::ldexp(1.0f, spec.error_bits - spec.emax - 1)), whole = floats(0x1p23f);
  each_vector(c, [=] BODY {
    const Floats v = to_units<R, D>(load<Floats>(x + i), in0, in1);
    Floats error = magnitude(v - to_element<R>(v, g, nullptr)) * out0 * unit;
    error = error < whole ? (error + whole) - whole : error;
    store(out + i, __builtin_convertvector(smaller(error, limit), Ints));
  });
}

template <bool D>
NOINLINE void to_saturated(const Chunk& c, const Spec& spec, int32_t* out) {
  const Floats highest = floats(spec.max_normal), lowest = floats(spec.lowest);
  const float* x = c.x;
  each_vector(c, [=] BODY {
    const Floats v = times_factors<D>(load<Floats>(x + i), in0, in1);
    store(out + i, ((v > highest) | (v < lowest)) & (out1 == out1));
  });
}

template <class T>
void clip(const int32_t* saturated, const void* grad, void* out, i64 first, i64 n) {
  const T* in = static_cast<const T*>(grad) + first;
  T* to = static_cast<T*>(out) + first;
#pragma omp simd
  for (i64 i = 0; i < n; ++i) to[i] = saturated[i] ? T(0) : in[i];
}

NOINLINE void from_codes(const Chunk& c, const Spec& spec, const u8* codes, float* out) {
  const int32_t m = spec.mantissa_bits, bias = 1 - spec.emin, sign_bit = 1 << (spec.bits - 1);
  const int32_t flip = spec.is_int ? sign_bit : 0;  // two's complement
  const int32_t mask = sign_bit - 1 + flip, shift = 23 - m, sign_shift = 32 - spec.bits;
  const Ints rebias = ints((kBias - bias) << 23), first_normal = ints(spec.is_int ? kMagnitude : 1 << m);
  // Inf and NaN: moves the format's last exponent to that of fp32
  const int32_t last = (1 << (spec.bits - 1 - m)) - 1;
  const Ints max_code = ints(spec.max_code), special = ints((kBias + 1 + bias - last) << 23);
  const Floats step = floats(std::ldexp(1.0f, spec.emin - m));
  const int32_t* in = c.scratch;
  convert(codes, c.n, c.scratch);
  each_vector(c, [=] BODY {
    const Ints code = load<Ints>(in + i);
    const Ints number = ((code & mask) ^ flip) - flip;
    const Floats normal = Floats((number << shift) + rebias + ((number > max_code) & special));
    const Floats p = number < first_normal ? __builtin_convertvector(number, Floats) * step : normal;
    store(out + i, Floats(Ints(p) | (code << sign_shift & kSign)) * out0 * out1);
  });
}

// Calls body(rounding) with a rounding as a constant.
template <class Body>
inline void with_rounding(int32_t rounding, Body body) {
  switch (rounding) {
    case EVEN: return body(std::integral_constant<int, EVEN>());
    case HALF_AWAY: return body(std::integral_constant<int, HALF_AWAY>());
    case HALF_TOWARD_ZERO: return body(std::integral_constant<int, HALF_TOWARD_ZERO>());
    case HALF_UP: return body(std::integral_constant<int, HALF_UP>());
    case TOWARD_ZERO: return body(std::integral_constant<int, TOWARD_ZERO>());
    case UP: return body(std::integral_constant<int, UP>());
    case DOWN: return body(std::integral_constant<int, DOWN>());
    default: return body(std::integral_constant<int, STOCHASTIC>());
  }
}

}  // namespace
