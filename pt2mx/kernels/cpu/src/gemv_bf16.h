// linear_mx of one row of x in bfloat16 by AVX512_BF16: a table in a register turns codes of 4 and 6 bits into
// bfloat16, which is exact, and an instruction multiplies 32 pairs of values and adds them to 16 sums in fp32.
//
// These instructions treat subnormal numbers as zero, and a block's scale multiplies the sum of the block. If x has
// values so small, or a row of the weight has scales so extreme, that this could lose precision, linear_fp32.h
// multiplies instead.

#pragma once

#include <cmath>
#include <mutex>
#include <type_traits>

#include "isa.h"
#include "linear_fp32.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

#define TARGET_AVX512_BF16 __attribute__((target("avx512vbmi,avx512bf16")))

namespace {

constexpr i64 kSpan = 4 * kGroup;  // values that are decoded together, to four vectors of 32

// The first `n` values of the table of codes as bfloat16; 16 of them twice, because a look-up takes five bits.
inline __m512i table_of(const LinearCall& call, int n) {
  u16 values[32];
  for (int i = 0; i < 32; ++i) values[i] = u16(bits_of(call.table[i % n]) >> 16);
  return _mm512_loadu_si512(values);
}

// A decoder has
//   kBytes            bytes of a span
//   kLanes            adjacent sums that belong to one block
//   decode            the codes of a span to four vectors
//   index_of(v, i)    the index in the span of value `i` of vector `v`

struct Bf16Nibbles {
  static constexpr i64 kBytes = 64;
  static constexpr int kLanes = 4;
  __m512i table;

  explicit Bf16Nibbles(const LinearCall& call) : table(table_of(call, 16)) {}
  static i64 index_of(i64 v, i64 i) { return 4 * i + v; }
  TARGET_AVX512_BF16 void decode(const u8* data, __m512i* out) const {
    const __m512i codes = _mm512_loadu_si512(data);  // a look-up ignores the bits above the code
    out[0] = _mm512_permutexvar_epi16(codes, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

// Every 16-bit word of `spread` gets the two bytes that hold one code, and a shift puts the code into the lowest bits:
//
//     byte      b2       b1       b0        code a: (b1 b0)          code b: (b1 b0) >> 6
//            ddddddcc ccccbbbb bbaaaaaa     code c: (b2 b1) >> 4     code d: (b2 b1) >> 10
//
// Five bits of the code choose a value of the table; the sixth, its sign, is moved to the top.
struct Bf16Sixes {
  static constexpr i64 kBytes = 96;
  static constexpr int kLanes = 16;
  __m512i table, spread, shifts;

  explicit Bf16Sixes(const LinearCall& call) : table(table_of(call, 32)) {
    u16 counts[32];
    u8 bytes[64];
    for (int i = 0; i < 32; ++i) {
      const int first = i / 4 * 3 + i % 4 / 2;
      bytes[2 * i] = u8(first);
      bytes[2 * i + 1] = u8(first + 1);
      counts[i] = u16(i % 4 / 2 * 4 + i % 2 * 6);
    }
    spread = _mm512_loadu_si512(bytes);
    shifts = _mm512_loadu_si512(counts);
  }
  static i64 index_of(i64 v, i64 i) { return kGroup * v + i; }
  TARGET_AVX512_BF16 void decode(const u8* data, __m512i* out) const {
    for (int v = 0; v < 4; ++v) {
      const __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(0xFFFFFF, data + 24 * v));
      const __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi8(spread, bytes), shifts);
      const __m512i values = _mm512_permutexvar_epi16(codes, table);
      out[v] = _mm512_ternarylogic_epi32(values, _mm512_slli_epi16(codes, 10), _mm512_set1_epi16(short(0x8000)), 0xF8);
    }
  }
};

// True for one row in bfloat16 on a processor with AVX512_BF16, unless x has values below 2**-100 other than zero: a
// sum could be subnormal.
inline bool supports_gemv(const LinearCall& c) {
  if (c.m > 1 || c.dtype != BF16 || !has_avx512_bf16()) return false;
  return !has_tiny(static_cast<const u16*>(c.x), c.k, 7);
}

struct Gemv {
  Linear& linear;
  const i64 spans;  // of a row; the last one may be partial
  Buffer<u16> x;    // (spans * kSpan) in the order of the decoder

  explicit Gemv(Linear& linear) : linear(linear), spans((linear.call.k + kSpan - 1) / kSpan) {}
};

template <class Pairs>
void arrange_x(Gemv& gemv) {
  const LinearCall& c = gemv.linear.call;
  gemv.x.resize(gemv.spans * kSpan);
  gemv.x.zero();
  u16* out = gemv.x.data();
  for (i64 first = 0; first < c.k; first += kSpan, out += kSpan) {
    for (i64 i = 0; i < kSpan; ++i) {
      const i64 at = first + Pairs::index_of(i / 32, i % 32);
      if (at < c.k) out[i] = static_cast<const u16*>(c.x)[at];
    }
  }
}

TARGET_AVX512_BF16 inline __m512 dot_bf16(__m512 sum, __m512i w, const u16* x) {
  return _mm512_dpbf16_ps(sum, __m512bh(w), __m512bh(_mm512_loadu_si512(x)));
}

// Returns total + spans of a row of the weight times x. `factors`: of each group, or of both halves of each group.
template <class Pairs, bool kHalves>
TARGET_AVX512_BF16 NOINLINE __m512 multiply_spans(const Pairs& pairs, const u8* codes, const float* factors,
                                                  const u16* x, i64 spans, __m512 total) {
  const Pairs decoder = pairs;  // a copy stays in registers
  const __m512i block_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512i half_of_lane = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  for (i64 s = 0; s < spans; ++s, codes += Pairs::kBytes, factors += kHalves ? 8 : 4, x += kSpan) {
    for (i64 at = 0; at < Pairs::kBytes; at += 64)
      __builtin_prefetch(codes + kAhead + at, 0, 1);  // to L2, which takes more prefetches
    __m512i w[4];
    decoder.decode(codes, w);
    __m512 sum = _mm512_setzero_ps();
    for (int v = 0; v < 4; ++v) {
      sum = dot_bf16(sum, w[v], x + v * 32);
      if (Pairs::kLanes == 16) {  // a vector is a block
        const __m512 factor = _mm512_set1_ps(factors[kHalves ? 2 * v : v]);
        const __m512 both = kHalves ? _mm512_mask_mov_ps(factor, 0xFF00, _mm512_set1_ps(factors[2 * v + 1])) : factor;
        total = _mm512_fmadd_ps(sum, both, total);
        sum = _mm512_setzero_ps();
      }
    }
    if (Pairs::kLanes == 4 && kHalves) {
      const __m512 halves = _mm512_castps256_ps512(_mm256_loadu_ps(factors));
      total = _mm512_fmadd_ps(sum, _mm512_permutexvar_ps(half_of_lane, halves), total);
    } else if (Pairs::kLanes == 4) {
      const __m512 blocks = _mm512_broadcast_f32x4(_mm_loadu_ps(factors));
      total = _mm512_fmadd_ps(sum, _mm512_permutexvar_ps(block_of_lane, blocks), total);
    }
  }
  return total;
}

// Writes the factors of the groups [begin, end) of a row, and zeros up to a whole span; `per_block` groups share a
// scale. Returns true if each factor is from 2**-64 to 2**64, or the smallest one, which blocks of zeros have.
inline bool set_factors(const u8* scale, i64 per_block, i64 begin, i64 end, float* out) {
  u8 expanded[kChunk];
  const u8* bytes = scales_of_groups(scale, per_block, begin, end, expanded);
  u32 extreme = 0;
#pragma omp simd reduction(| : extreme)
  for (i64 i = 0; i < end - begin; ++i) {
    const u32 byte = bytes[i];
    extreme |= byte && byte - (kBias - 64) > 128;
    out[i] = from_bits(byte ? byte << 23 : 1 << 22);
  }
  for (i64 i = end - begin; i % 4; ++i) out[i] = 0;
  return !extreme;
}

// The same for both halves of each group, of scales with a significand, which may also be zero.
inline bool set_factors(const LinearCall& c, i64 row, i64 begin, i64 end, HalfFactors* out) {
  const FloatScale& s = *c.float_scale;
  const bool usual = set_half_factors(c, row, begin, end, 1, 0, out);
  for (i64 i = end - begin; i % 4; ++i) out[i] = {0, 0};
  if (usual && s.emin - s.mantissa_bits >= -64 && s.max_value <= 0x1p64f) return true;
  u32 extreme = 0;
  for (i64 i = 0; i < end - begin; ++i) {
    for (const float factor : {out[i].first, out[i].second}) {
      const u32 magnitude = bits_of(factor) & kMagnitude;
      extreme |= magnitude && magnitude - ((kBias - 64) << 23) > 128u << 23;
    }
  }
  return !extreme;
}

// Returns one row of the weight times x; NaN if linear_fp32.h has to compute it.
template <class Pairs, bool kHalves>
float gemv_row(const Gemv& gemv, const Pairs& decoder, i64 row) {
  const LinearCall& c = gemv.linear.call;
  const i64 groups = gemv.linear.groups, whole = c.k / kSpan;
  __m512 sums = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; g += kChunk) {
    HalfFactors halves[kChunk];
    float ones[kChunk];
    const i64 end = std::min(g + kChunk, groups), first = g / 4;
    const bool usual = kHalves ? set_factors(c, row, g, end, halves)
                               : set_factors(c.scale + row * c.row_blocks, c.block / kGroup, g, end, ones);
    if (!usual) return NAN;
    const float* factors = kHalves ? &halves[0].first : ones;
    const i64 full = std::min((end - g + 3) / 4, whole - first);
    const u16* x = gemv.x.data() + g * kGroup;
    const u8* codes = c.data + row * c.row_bytes + first * Pairs::kBytes;
    sums = multiply_spans<Pairs, kHalves>(decoder, codes, factors, x, full, sums);
    if (end < groups || first + full == gemv.spans) continue;
    u8 padded[Pairs::kBytes];
    codes = last_group<Pairs, kSpan>(c, row, padded);
    sums =
        multiply_spans<Pairs, kHalves>(decoder, codes, factors + (kHalves ? 8 : 4) * full, x + full * kSpan, 1, sums);
  }
  return sum_of_lanes(Floats(sums)) * gemv.linear.result_factor;
}

template <class Pairs, class Decoder>
void run_gemv(i64 begin, i64 end, void* context) {
  const Gemv& gemv = *static_cast<const Gemv*>(context);
  const Pairs decoder(gemv.linear.call);
  const bool halves = gemv.linear.call.float_scale;
  const KeepSubnormals keep;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 row = tile * kRows, rows = std::min<i64>(kRows, gemv.linear.call.n - row);
    float y[kRows];
    bool finite = true;
    for (i64 q = 0; q < rows; ++q) {
      y[q] = (halves ? gemv_row<Pairs, true> : gemv_row<Pairs, false>)(gemv, decoder, row + q);
      finite &= std::abs(y[q]) < INFINITY;  // an Inf may come from a sum that is finite once scaled
    }
    if (finite) {
      finish(gemv.linear, 0, row, rows, y);
    } else {
      prepare_once(gemv.linear, Decoder::kEvenOdd);
      run<Decoder, 1>(tile, tile + 1, &gemv.linear);
    }
  }
}

// The decoder to bfloat16 of the codes of `Decoder`, if they have 4 or 6 bits.
template <class Decoder>
struct Bf16DecoderOf {
  using type = void;
};
template <>
struct Bf16DecoderOf<Nibbles> {
  using type = Bf16Nibbles;
};
template <int E, int M, bool Nan>
struct Bf16DecoderOf<Halves<E, M, Nan>> {
  using type = std::conditional_t<E + M == 5, Bf16Sixes, void>;
};

template <class Pairs, class Decoder>
int32_t gemv_bf16(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  Gemv gemv(linear);
  arrange_x<Pairs>(gemv);
  return parallel_for(0, tiles, grain, run_gemv<Pairs, Decoder>, &gemv);
}

}  // namespace

#endif
