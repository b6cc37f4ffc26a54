// linear_mx of up to 32 rows of x in fp32 vectors, for weights of 4 bits with E8M0 scales: a look-up turns codes into
// values without their scale, once for all rows of x, and the scale multiplies the sum of a block, which is exact. The
// sums of a row of x have one order, alone and among other rows.
//
// A span is a vector of codes. The values of one block fill adjacent lanes of every vector of a span, so one sum of
// vectors holds the sums of all blocks of the span.

#pragma once

#include <algorithm>
#include <cmath>
#include <mutex>
#include <type_traits>

#include "linear_fp32.h"

namespace {

constexpr i64 kSpanBytes = 4 * kWidth;       // of codes of 4 bits
constexpr i64 kSpanValues = 2 * kSpanBytes;  // whole blocks of 32
constexpr int kSpanVectors = 8;              // kSpanValues / kWidth
constexpr int kSpanGroups = kSpanValues / kGroup;
constexpr i64 kPastSpan = 3;                  // bytes after a span that a decoder may read
constexpr i64 kTiles = 8;                     // of kRows rows of the weight whose results are stored together
constexpr i64 kRowsBeforeAmx = 10;            // the most rows of x in fp32 for which AMX takes longer, as measured
constexpr int kBand = 4 * kRows;              // rows of the weight that several rows of x in the cache multiply
constexpr int kShare = kWidth == 16 ? 2 : 1;  // rows of the weight that are decoded in registers together

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
  // Writes the values in the order of `index_of`.
  void decode(const u8* codes, Floats* w) const {
    for (int b = 0; b < 4; ++b) {  // a look-up ignores the bits above the code
      const __m512i even = _mm512_loadu_si512(codes + b);
      w[2 * b] = Floats(_mm512_permutexvar_ps(even, table));
      w[2 * b + 1] = Floats(_mm512_permutexvar_ps(_mm512_srli_epi32(even, 4), table));
    }
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
  void decode(const u8* codes, Floats* w) const {
    const __m256i bytes = load256(codes), mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xFFFF0000));
    const __m256i nibbles[2] = {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
    for (int h = 0; h < 2; ++h) {
      const __m256i lower = _mm256_shuffle_epi8(low, nibbles[h]), top = _mm256_shuffle_epi8(high, nibbles[h]);
      const __m256i halves[2] = {_mm256_unpacklo_epi8(lower, top), _mm256_unpackhi_epi8(lower, top)};
      for (int u = 0; u < 2; ++u) {
        w[4 * h + 2 * u] = Floats(_mm256_slli_epi32(halves[u], 16));
        w[4 * h + 2 * u + 1] = Floats(_mm256_and_si256(halves[u], upper));
      }
    }
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

struct LinearNibbles {
  Linear& linear;
  const i64 spans;  // of a row; the last one may be partial
  Buffer<float> x;  // (spans, m, kSpanValues), each span in the order of the decoder

  template <class Span>
  LinearNibbles(Linear& linear, Span*) : linear(linear), spans((linear.call.k + kSpanValues - 1) / kSpanValues) {
    const LinearCall& c = linear.call;
    std::vector<float> row(spans * kSpanValues);
    int32_t order[kSpanValues];
    for (i64 i = 0; i < kSpanValues; ++i) order[i] = int32_t(Span::index_of(i / kWidth, i % kWidth));
    x.resize(spans * c.m * kSpanValues);
    for (i64 m = 0; m < c.m; ++m) {
      get_floats(c.x, m * c.k, c.k, c.dtype, row.data());
      for (i64 s = 0; s < spans; ++s) {
        const float* from = row.data() + s * kSpanValues;
        float* out = x.data() + (s * c.m + m) * kSpanValues;
        for (i64 i = 0; i < kSpanValues; ++i) out[i] = from[order[i]];
      }
    }
  }

  // Returns how many spans of the rows up to `last` are read in place: not past the end of the weight.
  i64 spans_in_place(i64 last) const {
    const LinearCall& c = linear.call;
    const i64 rows = std::max<i64>(1, c.n - last);
    const i64 of_codes = std::max<i64>(0, rows * c.row_bytes - kPastSpan) / kSpanBytes;
    return std::min({spans, of_codes, rows * c.row_blocks / kSpanGroups});
  }
};

// Returns the sum of a span's values times x, in each lane.
inline Floats dot(const Floats* w, const float* x) {
  Floats sum = w[0] * load<Floats>(x);
  for (int v = 1; v < kSpanVectors; ++v) sum = fused(w[v], load<Floats>(x + v * kWidth), sum);
  return sum;
}

// totals: (kRows) += `spans` spans of kRows rows of the weight times one row of x.
template <class Span>
NOINLINE void multiply_row(const Span& span, const u8* const* codes, const u8* const* scales, const float* x, i64 spans,
                           Floats* totals) {
  const Span decoder = span;  // a copy stays in registers
  Floats total[kRows];
  for (int q = 0; q < kRows; ++q) total[q] = totals[q];
  for (i64 s = 0; s < spans; ++s, x += kSpanValues) {
    for (int q = 0; q < kRows; ++q) {
      const u8* data = codes[q] + s * kSpanBytes;
      __builtin_prefetch(data + kAhead);
      Floats w[kSpanVectors];
      decoder.decode(data, w);
      total[q] = fused(dot(w, x), Span::factors(scales[q] + s * kSpanGroups), total[q]);
    }
  }
  for (int q = 0; q < kRows; ++q) totals[q] = total[q];
}

// totals: (kBand / kShare, m, kShare) += `spans` spans of kBand rows of the weight times m rows of x. Prefetches the
// codes `ahead` bytes further.
template <class Span>
NOINLINE void multiply_rows(const Span& span, const u8* const* codes, const u8* const* scales, i64 ahead,
                            const float* x, i64 m, i64 spans, Floats* totals) {
  const Span decoder = span;
  for (i64 s = 0; s < spans; ++s, x += m * kSpanValues) {
    Floats* total = totals;
    for (int q = 0; q < kBand; q += kShare) {
      Floats w[kShare][kSpanVectors], factors[kShare];
      for (int j = 0; j < kShare; ++j) {
        const u8* data = codes[q + j] + s * kSpanBytes;
        __builtin_prefetch(data + ahead, 0, 1);
        decoder.decode(data, w[j]);
        factors[j] = Span::factors(scales[q + j] + s * kSpanGroups);
      }
      const float* values = x;
      for (i64 r = 0; r < m; ++r, values += kSpanValues, total += kShare) {
        Floats sums[kShare];
        for (int v = 0; v < kSpanVectors; ++v) {
          const Floats value = load<Floats>(values + v * kWidth);
          for (int j = 0; j < kShare; ++j) sums[j] = v ? fused(w[j][v], value, sums[j]) : w[j][v] * value;
        }
        for (int j = 0; j < kShare; ++j) total[j] = fused(sums[j], factors[j], total[j]);
      }
    }
  }
}

// Writes Q rows of the weight from `row` on times x to y: (m, kTiles * kRows). computed: (Q / kRows), of which it
// clears those whose results are no finite numbers: an Inf may come from a sum that is finite once scaled.
template <int Q, class Span>
void multiply_tiles(const LinearNibbles& nibbles, const Span& span, i64 row, float* y, bool* computed) {
  const LinearCall& c = nibbles.linear.call;
  // x is zero past the end of a row
  const i64 whole = nibbles.spans_in_place(row + Q - 1);
  const u8 *codes[Q], *scales[Q];
  for (int q = 0; q < Q; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    codes[q] = c.data + at * c.row_bytes;
    scales[q] = c.scale + at * c.row_blocks;
  }
  Floats totals[Q == kRows ? Q : Q * kFewRows];  // (Q / kShare, m, kShare)
  for (i64 i = 0; i < Q * c.m; ++i) totals[i] = Floats{};
  const auto multiply = [&](const float* x, i64 spans) {
    if constexpr (Q == kRows) multiply_row(span, codes, scales, x, spans, totals);
    else multiply_rows(span, codes, scales, Q * c.row_bytes, x, c.m, spans, totals);
  };
  multiply(nibbles.x.data(), whole);
  if (whole < nibbles.spans) {
    u8 last_codes[Q][2 * kSpanBytes + kPastSpan] = {}, last_scales[Q][2 * kSpanGroups] = {};
    for (int q = 0; q < Q; ++q) {
      std::memcpy(last_codes[q], codes[q] + whole * kSpanBytes, c.row_bytes - whole * kSpanBytes);
      std::memcpy(last_scales[q], scales[q] + whole * kSpanGroups, c.row_blocks - whole * kSpanGroups);
      codes[q] = last_codes[q];
      scales[q] = last_scales[q];
    }
    multiply(nibbles.x.data() + whole * c.m * kSpanValues, nibbles.spans - whole);
  }
  for (i64 q = 0; q < Q; ++q) {
    for (i64 m = 0; m < c.m; ++m) {
      float& sum = y[m * kTiles * kRows + q];
      sum = sum_of_lanes(totals[(q / kShare * c.m + m) * kShare + q % kShare]);
      computed[q / kRows] &= std::abs(sum) < INFINITY;
    }
  }
}

// True for blocks of 32 with E8M0 scales, unless AMX is faster, or x has values below 2**-100 other than zero: a sum
// could be subnormal.
inline bool supports_nibbles(const LinearCall& c) {
  if (c.block != kGroup || c.float_scale || (c.isa & AMX && (c.dtype == BF16 || c.m > kRowsBeforeAmx))) return false;
  if (c.dtype == FP32) return !has_tiny(static_cast<const u32*>(c.x), c.m * c.k, 23);
  return c.dtype == BF16 && !has_tiny(static_cast<const u16*>(c.x), c.m * c.k, 7);
}

template <class Span, class Decoder>
void run_linear_nibbles(i64 begin, i64 end, void* context) {
  const LinearNibbles& nibbles = *static_cast<const LinearNibbles*>(context);
  const LinearCall& c = nibbles.linear.call;
  const Span span(c);
  const KeepSubnormals keep;
  for (i64 tile = begin; tile < end; tile += kTiles) {
    const i64 count = std::min(kTiles, end - tile), row = tile * kRows, band = c.m == 1 ? 1 : kBand / kRows;
    const auto rows = [&](i64 i, i64 tiles) { return std::min(tiles * kRows, c.n - row - i * kRows); };
    float y[kFewRows * kTiles * kRows];
    // for each tile alone, because threads divide tiles. A sum without an extreme scale could lose precision
    bool computed[kTiles] = {};
    for (i64 i = 0; i < count; ++i) {
      const i64 next = nibbles.spans * kSpanGroups - c.row_blocks;  // that the last span of a row reads
      computed[i] = scales_of_rows(c, row + i * kRows, rows(i, 1), next).is_within(kBias - 64, kBias + 64);
    }
    for (i64 i = 0; i < count; i += band) {
      if (std::none_of(computed + i, computed + i + band, [](bool one) { return one; })) continue;
      const auto multiply = c.m == 1 ? multiply_tiles<kRows, Span> : multiply_tiles<kBand, Span>;
      multiply(nibbles, span, row + i * kRows, y + i * kRows, computed + i);
    }
    for (i64 i = 0, next; i < count; i = next) {
      for (next = i + 1; next < count && computed[next] == computed[i];) ++next;
      if (computed[i]) {
        float* from = y + i * kRows;
        for (i64 m = 0; m < c.m; ++m, from += kTiles * kRows) {
          finish(nibbles.linear, m, row + i * kRows, rows(i, next - i), from);
        }
      } else {
        prepare_once(nibbles.linear, Decoder::kEvenOdd);
        (c.m == 1 ? run<Decoder, 1> : run<Decoder, 4>)(tile + i, tile + next, &nibbles.linear);
      }
    }
  }
}

// Returns kUnsupported, and computes nothing, for other formats, scales and values.
template <class Decoder>
int32_t linear_nibbles(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  using Span = typename SpanOf<Decoder>::type;
  if constexpr (!std::is_void<Span>::value) {
    if (!supports_nibbles(linear.call)) return kUnsupported;
    LinearNibbles nibbles(linear, (Span*)nullptr);
    return parallel_for(0, tiles, grain, run_linear_nibbles<Span, Decoder>, &nibbles);
  }
  return kUnsupported;
}

}  // namespace
