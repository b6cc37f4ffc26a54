// linear_mx of one row of x in fp32 vectors, for weights of 4 bits with E8M0 scales: a look-up turns codes into values
// without their scale, and the scale multiplies the sum of a block, which is exact.
//
// A span is a vector of codes. The values of one block fill adjacent lanes of every vector of a span, so one sum of
// vectors holds the sums of all blocks of the span.

#pragma once

#include <cmath>
#include <mutex>
#include <type_traits>

#include "linear_fp32.h"

namespace {

constexpr i64 kSpanBytes = 4 * kWidth;       // of codes of 4 bits
constexpr i64 kSpanValues = 2 * kSpanBytes;  // whole blocks of 32
constexpr int kSpanVectors = 8;              // kSpanValues / kWidth
constexpr int kSpanGroups = kSpanValues / kGroup;
constexpr i64 kPastSpan = 3;  // bytes after a span that a decoder may read
constexpr i64 kTiles = 8;     // of kRows rows of the weight whose results are stored together

// The kernel's decoder for codes of `Decoder`.
template <class Decoder>
struct SpanOf {
  using type = void;
};

#if defined(__AVX512BW__)

// Lane i of vector v is code 8 * i + v: every lane has 8 codes, and a load one byte later shifts all of them by 8 bits.
struct NibbleSpan {
  __m512 table;
  explicit NibbleSpan(const LinearCall& c) : table(_mm512_loadu_ps(c.table)) {}
  static i64 index_of(i64 v, i64 i) { return 8 * i + v; }
  // Returns the sum of the values times x: (kSpanValues) in the order of `index_of`.
  Floats dot(const u8* codes, const float* x) const {
    __m512 sum[2] = {};
    for (int b = 0; b < 4; ++b) {  // a look-up ignores the bits above the code
      const __m512i even = _mm512_loadu_si512(codes + b), odd = _mm512_srli_epi32(even, 4);
      sum[0] = _mm512_fmadd_ps(_mm512_permutexvar_ps(even, table), _mm512_loadu_ps(x + 2 * b * kWidth), sum[0]);
      sum[1] = _mm512_fmadd_ps(_mm512_permutexvar_ps(odd, table), _mm512_loadu_ps(x + (2 * b + 1) * kWidth), sum[1]);
    }
    return Floats(_mm512_add_ps(sum[0], sum[1]));
  }
  // Returns the scales of a span's blocks in the lanes of their sums.
  static Floats factors(const u8* scale) {
    const __m512i to_top = _mm512_set_epi32(3 << 24, 3 << 24, 3 << 24, 3 << 24, 2 << 24, 2 << 24, 2 << 24, 2 << 24,
                                            1 << 24, 1 << 24, 1 << 24, 1 << 24, 0, 0, 0, 0);
    const __m512i bytes =
        _mm512_maskz_shuffle_epi8(0x8888888888888888, _mm512_set1_epi32(load<int32_t>(scale)), to_top);
    return Floats(_mm512_srli_epi32(bytes, 1));
  }
};

#elif defined(__AVX2__)

// The two upper bytes of a value make a bfloat16. Vector v = 4 h + 2 u + p, lane i of half i / 4, is nibble h of byte
// 2 * (i % 4) + p of the lower (u = 0) or upper 8 bytes of that half.
struct NibbleSpan {
  __m256i low, high;  // bytes of the values
  explicit NibbleSpan(const LinearCall& c) {
    alignas(16) u8 bytes[2][16];
    for (int i = 0; i < 16; ++i) {
      bytes[0][i] = u8(bits_of(c.table[i]) >> 16);
      bytes[1][i] = u8(bits_of(c.table[i]) >> 24);
    }
    low = _mm256_broadcastsi128_si256(load128(bytes[0]));
    high = _mm256_broadcastsi128_si256(load128(bytes[1]));
  }
  static i64 index_of(i64 v, i64 i) { return 2 * (i / 4 * 16 + v / 2 % 2 * 8 + i % 4 * 2 + v % 2) + v / 4; }
  Floats dot(const u8* codes, const float* x) const {
    const __m256i bytes = load256(codes), mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xFFFF0000));
    const __m256i nibbles[2] = {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
    __m256 sum[2] = {};
    for (int h = 0; h < 2; ++h, x += 4 * kWidth) {
      const __m256i lower = _mm256_shuffle_epi8(low, nibbles[h]), top = _mm256_shuffle_epi8(high, nibbles[h]);
      const __m256i halves[2] = {_mm256_unpacklo_epi8(lower, top), _mm256_unpackhi_epi8(lower, top)};
      for (int u = 0; u < 2; ++u) {
        const __m256i even = _mm256_slli_epi32(halves[u], 16), odd = _mm256_and_si256(halves[u], upper);
        const float* values = x + 2 * u * kWidth;
        sum[0] = _mm256_fmadd_ps(_mm256_castsi256_ps(even), _mm256_loadu_ps(values), sum[0]);
        sum[1] = _mm256_fmadd_ps(_mm256_castsi256_ps(odd), _mm256_loadu_ps(values + kWidth), sum[1]);
      }
    }
    return Floats(_mm256_add_ps(sum[0], sum[1]));
  }
  static Floats factors(const u8* scale) {
    const __m256i to_top = _mm256_setr_epi32(0x00808080, 0x00808080, 0x00808080, 0x00808080, 0x01808080, 0x01808080,
                                             0x01808080, 0x01808080);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi16(load<int16_t>(scale)), to_top);
    return Floats(_mm256_srli_epi32(bytes, 1));
  }
};

#endif

#if defined(__AVX512BW__) || defined(__AVX2__)
template <>
struct SpanOf<Nibbles> {
  using type = NibbleSpan;
};
#endif

struct GemvFp32 {
  Linear& linear;
  const i64 spans;  // of a row; the last one may be partial
  Buffer<float> x;  // (spans * kSpanValues) in the order of the decoder

  template <class Span>
  GemvFp32(Linear& linear, Span*) : linear(linear), spans((linear.call.k + kSpanValues - 1) / kSpanValues) {
    const LinearCall& c = linear.call;
    std::vector<float> row(spans * kSpanValues);
    get_floats(c.x, 0, c.k, c.dtype, row.data());
    x.resize(spans * kSpanValues);
    float* out = x.data();
    for (i64 s = 0; s < spans; ++s) {
      for (i64 v = 0; v < kSpanVectors; ++v, out += kWidth) {
        for (i64 i = 0; i < kWidth; ++i) out[i] = row[s * kSpanValues + Span::index_of(v, i)];
      }
    }
  }
};

// totals += `spans` spans of kRows rows of the weight times x.
template <class Span>
NOINLINE void multiply_spans(const Span& span, const u8* const* codes, const u8* const* scales, const float* x,
                             i64 spans, Floats* totals) {
  const Span decoder = span;  // a copy stays in registers
  Floats total[kRows];
  for (int q = 0; q < kRows; ++q) total[q] = totals[q];
  for (i64 s = 0; s < spans; ++s, x += kSpanValues) {
    for (int q = 0; q < kRows; ++q) {
      const u8* data = codes[q] + s * kSpanBytes;
      __builtin_prefetch(data + kAhead);
      total[q] = fma(decoder.dot(data, x), Span::factors(scales[q] + s * kSpanGroups), total[q]);
    }
  }
  for (int q = 0; q < kRows; ++q) totals[q] = total[q];
}

// Returns true if the scales of the blocks are from 2**-64 to 2**64.
inline bool are_moderate(const u8* scale, i64 n) {
  u8 extreme = 0;
#pragma omp simd reduction(| : extreme)
  for (i64 i = 0; i < n; ++i) extreme |= u8(scale[i] - (kBias - 64)) > 128;
  return !extreme;
}

// Writes kRows rows of the weight from `row` on times x to y. Returns false if linear_fp32.h has to compute them: a
// scale is extreme, so that a sum without it could lose precision, or a result is no finite number.
template <class Span>
bool gemv_rows(const GemvFp32& gemv, const Span& span, i64 row, float* y) {
  const LinearCall& c = gemv.linear.call;
  // the last span of the weight may not be read past its end
  const i64 whole = c.k / kSpanValues - (row + kRows >= c.n && c.k % kSpanValues == 0);
  const u8 *codes[kRows], *scales[kRows];
  for (int q = 0; q < kRows; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    codes[q] = c.data + at * c.row_bytes;
    scales[q] = c.scale + at * c.row_blocks;
    if (!are_moderate(scales[q], c.row_blocks)) return false;
  }
  Floats totals[kRows] = {};
  multiply_spans(span, codes, scales, gemv.x.data(), whole, totals);
  if (whole < gemv.spans) {
    u8 last_codes[kRows][kSpanBytes + kPastSpan] = {}, last_scales[kRows][kSpanGroups] = {};
    for (int q = 0; q < kRows; ++q) {
      std::memcpy(last_codes[q], codes[q] + whole * kSpanBytes, c.row_bytes - whole * kSpanBytes);
      std::memcpy(last_scales[q], scales[q] + whole * kSpanGroups, c.row_blocks - whole * kSpanGroups);
      codes[q] = last_codes[q];
      scales[q] = last_scales[q];
    }
    multiply_spans(span, codes, scales, gemv.x.data() + whole * kSpanValues, 1, totals);
  }
  bool finite = true;
  for (int q = 0; q < kRows; ++q) {
    y[q] = sum_of_lanes(totals[q]);
    finite &= std::abs(y[q]) < INFINITY;  // an Inf may come from a sum that is finite once scaled
  }
  return finite;
}

// True for blocks of 32 with E8M0 scales, unless x has values below 2**-100 other than zero: a sum could be subnormal.
inline bool supports_gemv_fp32(const LinearCall& c) {
  if (c.block != kGroup || c.float_scale) return false;
  if (c.dtype == FP32) return !has_tiny(static_cast<const u32*>(c.x), c.k, 23);
  return c.dtype == BF16 && !has_tiny(static_cast<const u16*>(c.x), c.k, 7);
}

template <class Span, class Decoder>
void run_gemv_fp32(i64 begin, i64 end, void* context) {
  const GemvFp32& gemv = *static_cast<const GemvFp32*>(context);
  const Span span(gemv.linear.call);
  const KeepSubnormals keep;
  for (i64 tile = begin; tile < end; tile += kTiles) {
    const i64 count = std::min(kTiles, end - tile), row = tile * kRows;
    float y[kTiles * kRows];
    bool computed = true;
    for (i64 i = 0; i < count; ++i) computed &= gemv_rows(gemv, span, row + i * kRows, y + i * kRows);
    if (computed) {
      finish(gemv.linear, 0, row, std::min(count * kRows, gemv.linear.call.n - row), y);
    } else {
      prepare_once(gemv.linear, Decoder::kEvenOdd);
      run<Decoder, 1>(tile, tile + count, &gemv.linear);
    }
  }
}

// Returns kUnsupported, and computes nothing, for other formats, scales and values.
template <class Decoder>
int32_t gemv_fp32(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  using Span = typename SpanOf<Decoder>::type;
  if constexpr (!std::is_void<Span>::value) {
    if (!supports_gemv_fp32(linear.call)) return kUnsupported;
    GemvFp32 gemv(linear, (Span*)nullptr);
    return parallel_for(0, tiles, grain, run_gemv_fp32<Span, Decoder>, &gemv);
  }
  return kUnsupported;
}

}  // namespace
