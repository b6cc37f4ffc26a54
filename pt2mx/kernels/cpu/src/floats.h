// Floats: their bits, the formats of 16 bits, vectors, and values in memory in one of the three dtypes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "calls.h"

namespace {

using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr int32_t kBias = 127, kMantissa = 0x7FFFFF, kInf = 0x7F800000, kMagnitude = 0x7FFFFFFF, kSign = INT32_MIN;

inline u32 bits_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bits(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Keeps subnormal numbers even under torch.set_flush_denormal, because a scale of 2**-127 is subnormal.
class KeepSubnormals {
 public:
#if defined(__x86_64__)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(u64(1) << 24)) : "memory");
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }

 private:
  u64 saved_;
#endif
};

#define NOINLINE __attribute__((noinline))  // an inlined loop shares registers with other code
#define UNUSED [[maybe_unused]]

// ---- 16-bit floats ----

inline float widen_half(u16 half) {
  const float scaled = from_bits(u32(half & 0x7FFF) << 13) * 0x1p112f;  // rebias the exponent; subnormals too
  const u32 magnitude = (half & 0x7C00) == 0x7C00 ? bits_of(scaled) | kInf : bits_of(scaled);
  return from_bits(magnitude | u32(half & 0x8000) << 16);
}

inline u16 narrow_half(float x) {  // ties to even
  const u32 bits = bits_of(x), magnitude = bits & kMagnitude;
  const u32 odd = magnitude >> 13 & 1;
  const u32 normal = (magnitude - (112u << 23) + 0xFFF + odd) >> 13;
  const u32 subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3F000000;  // the sum rounds to multiples of 2**-24
  u32 half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x47800000 ? (magnitude > u32(kInf) ? 0x7E00 : 0x7C00) : half;
  return u16(half | (bits >> 16 & 0x8000));
}

inline u16 narrow_bfloat(float x) {  // ties to even; a NaN must be the canonical one
  const u32 bits = bits_of(x);
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

NOINLINE void widen(const u16* x, i64 n, int32_t dtype, float* out) {
  i64 i = 0;
  if (dtype == BF16) {
#pragma omp simd
    for (i = 0; i < n; ++i) out[i] = from_bits(u32(x[i]) << 16);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#endif
  for (; i < n; ++i) out[i] = widen_half(x[i]);
}

NOINLINE void narrow(const float* x, i64 n, int32_t dtype, u16* out) {
  i64 i = 0;
  if (dtype == BF16) {
#pragma omp simd
    for (i = 0; i < n; ++i) out[i] = narrow_bfloat(x[i]);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) out[i] = narrow_half(x[i]);
}

// Converts n values of x, from value `at` on, to fp32.
inline void get_floats(const void* x, i64 at, i64 n, int32_t dtype, float* y) {
  if (dtype == FP32) std::memcpy(y, static_cast<const float*>(x) + at, 4 * n);
  else widen(static_cast<const u16*>(x) + at, n, dtype, y);
}

// Stores y: (n) at value `at` of the output, in a dtype. NaNs become the canonical one, as narrow_bfloat needs it.
inline void put_floats(float* y, i64 n, int32_t dtype, void* out, i64 at) {
#pragma omp simd
  for (i64 i = 0; i < n; ++i) y[i] = y[i] == y[i] ? y[i] : from_bits(0x7FC00000);
  if (dtype == FP32) std::memcpy(static_cast<float*>(out) + at, y, 4 * n);
  else narrow(y, n, dtype, static_cast<u16*>(out) + at);
}

// ---- a vector of values ----

// Vectors of the target's width, by the extension that GCC and Clang share.
#if defined(__AVX512F__)
constexpr i64 kWidth = 16;
#elif defined(__AVX__)
constexpr i64 kWidth = 8;
#else
constexpr i64 kWidth = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T, class V>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats floats(float x) { return x - Floats{}; }  // a sum would lose the sign of zero
inline Ints ints(int32_t x) { return Ints{} + x; }

// Returns a * b + c, rounded once if the processor has fused multiply-add.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns true if any bit is 1.
inline bool any_bit(Ints v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(v), __m512i(v));
#elif defined(__AVX2__)
  return !_mm256_testz_si256(__m256i(v), __m256i(v));
#else
  int32_t bits = 0;
  for (i64 i = 0; i < kWidth; ++i) bits |= v[i];
  return bits;
#endif
}

// Adds the upper half to the lower one until one lane is left.
inline float sum_of_lanes(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(__m512(v));
#endif
  float lanes[kWidth];
  store(lanes, v);
  for (i64 half = kWidth / 2; half; half /= 2) {
    for (i64 i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// ---- a vector of values of a dtype ----

inline Floats widened(const void* x, int32_t dtype, i64 at) {
  if (dtype == FP32) return load<Floats>(static_cast<const float*>(x) + at);
  const u16* from = static_cast<const u16*>(x) + at;
#if defined(__AVX512F__)
  const __m256i halves = load<__m256i>(from);
  return dtype == FP16 ? Floats(_mm512_cvtph_ps(halves)) : Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i halves = load<__m128i>(from);
  return dtype == FP16 ? Floats(_mm256_cvtph_ps(halves)) : Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  float out[kWidth];
  widen(from, kWidth, dtype, out);
  return load<Floats>(out);
#endif
}

// Rounds v to a dtype, ties to even. A NaN must be the canonical one: rounding to bfloat16 carries others away.
inline Floats rounded(Floats v, int32_t dtype) {
  if (dtype == FP32) return v;
  if (dtype == BF16) return Floats((Ints(v) + 0x7FFF + (Ints(v) >> 16 & 1)) & ~0xFFFF);
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  float out[kWidth];
  store(out, v);
  for (float& x : out) x = widen_half(narrow_half(x));
  return load<Floats>(out);
#endif
}

// Stores values that the dtype represents.
inline void store_as(void* out, int32_t dtype, i64 at, Floats v) {
  if (dtype == FP32) return store(static_cast<float*>(out) + at, v);
  u16* to = static_cast<u16*>(out) + at;
#if defined(__AVX512F__)
  if (dtype == BF16) store(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(__m512i(v), 16)));
  else store(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256i upper = _mm256_srli_epi32(__m256i(v), 16);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  store(to, dtype == BF16 ? halves : _mm256_cvtps_ph(__m256(v), _MM_FROUND_TO_NEAREST_INT));
#else
  float in[kWidth];
  store(in, v);
  narrow(in, kWidth, dtype, to);
#endif
}

// Stores two vectors.
inline void store_two(void* out, int32_t dtype, i64 at, Floats first, Floats second) {
#if defined(__AVX512BW__)
  if (dtype == BF16) {
    alignas(64) static constexpr u16 kUpper[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i halves = _mm512_permutex2var_epi16(__m512i(first), load<__m512i>(kUpper), __m512i(second));
    return store(static_cast<u16*>(out) + at, halves);
  }
#endif
  store_as(out, dtype, at, first);
  store_as(out, dtype, at + kWidth, second);
}

}  // namespace
