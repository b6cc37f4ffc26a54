// linear_mx of up to 32 rows of x whose values, like the weight's, are 8-bit integers times one power of two per group:
// by vpmaddubsw of AVX2 and AVX-512, or by vpdpbusd of AVX_VNNI and AVX512_VNNI.
//
// Codes are decoded once for all rows of x, a strip of groups at a time. Sums of a group are exact, one multiply-add a
// group applies both scales, and sums of a row are in fp32, in the order of gemm_vnni.h: results have the same bits
// with every instruction set.

#pragma once

#include <atomic>
#include <mutex>

#include "int8_microkernel.h"
#include "linear.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

constexpr i64 kStripsAhead = 4;  // from the strip being multiplied to the one being prefetched, as measured

struct LinearInt8 {
  const Linear& linear;
  Buffer<CodeGroup> x;      // (m, groups)
  ExponentRange exponents;  // of x
  std::mutex mutex;         // of `exponents`
  std::atomic<bool> unsupported{false};

  explicit LinearInt8(const Linear& linear) : linear(linear) { x.resize(linear.call.m * linear.groups); }
};

// Converts rows of x to codes, in the order of the decoder.
template <class Columns>
void encode_rows(i64 begin, i64 end, void* context) {
  LinearInt8& int8 = *static_cast<LinearInt8*>(context);
  const LinearCall& c = int8.linear.call;
  const KeepSubnormals keep;
  const int32_t offset = Columns(c.table).offset;
  // of eight codes
  const __m256i even_odd =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  ExponentRange range;
  for (i64 m = begin; m < end && !int8.unsupported; ++m) {
    CodeGroup* out = int8.x.data() + m * int8.linear.groups;
    for (i64 first = 0; first < c.k; first += kGroup, ++out) {
      float values[kGroup] = {};
      int32_t exponent;
      get_floats(c.x, m * c.k + first, std::min(kGroup, c.k - first), c.dtype, values);
      if (!to_codes(values, out, &exponent)) {
        int8.unsupported = true;
        return;
      }
      range.add(exponent);
      out->offset *= -offset;
      if (Columns::kEvenOdd) store(out->codes, _mm256_shuffle_epi8(load256(out->codes), even_odd));
    }
  }
  const std::lock_guard<std::mutex> lock(int8.mutex);
  int8.exponents.add(range);
}

// Up to kStripGroups groups of kWidth rows of the weight. They are copied, because rows a power of two apart share few
// lines of the cache.
template <class Decoder>
struct Strip {
  static constexpr i64 kBytes = kStripGroups * Decoder::kBytes;
  alignas(64) u8 codes[kWidth * kBytes];
  u8 scales[kWidth * kStripGroups];

  void read(const LinearCall& c, i64 row, i64 first, i64 groups) {
    const i64 begin = first * Decoder::kBytes, per_block = c.block / kGroup;
    if (row + kWidth <= c.n && groups == kStripGroups && begin + kBytes <= c.row_bytes && per_block == 1) {
      const u8 *data = c.data + row * c.row_bytes + begin, *scale = c.scale + row * c.row_blocks + first;
      for (i64 q = 0; q < kWidth; ++q, data += c.row_bytes, scale += c.row_blocks) {
        std::memcpy(codes + q * kBytes, data, kBytes);
        std::memcpy(scales + q * kStripGroups, scale, kStripGroups);
      }
      return;
    }
    const i64 bytes = std::min(kBytes, c.row_bytes - begin);
    for (i64 q = 0; q < kWidth; ++q) {
      const i64 at = std::min(row + q, c.n - 1);
      std::memcpy(codes + q * kBytes, c.data + at * c.row_bytes + begin, bytes);
      std::memset(codes + q * kBytes + bytes, 0, kBytes - bytes);  // so that zeros fill a group of zeros
      for (i64 g = 0; g < kStripGroups; ++g) {
        scales[q * kStripGroups + g] = g < groups ? c.scale[at * c.row_blocks + (first + g) / per_block] : kBias;
      }
    }
  }
  // Prefetches an eighth of the codes of kWidth rows from `row` on.
  static void prefetch(const LinearCall& c, i64 row, i64 first, i64 eighth) {
    const u8* data = c.data + row * c.row_bytes + first * Decoder::kBytes;
    for (i64 q = eighth * kWidth / 8; q < (eighth + 1) * kWidth / 8; ++q) {
      for (i64 b = 0; b < kBytes; b += 64) __builtin_prefetch(data + q * c.row_bytes + b);
    }
  }
};

// Transposes the scales of 8 groups of 8 rows: out[i] has those of groups 2 i and 2 i + 1.
inline void transpose_scales(const u8* scale, __m128i* out) {
  __m128i pairs[4], quads[4];
  for (int i = 0; i < 4; ++i) {
    const u8* row = scale + 2 * i * kStripGroups;
    pairs[i] = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)),
                                 _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + kStripGroups)));
  }
  for (int i = 0; i < 2; ++i) {
    quads[i] = _mm_unpacklo_epi16(pairs[2 * i], pairs[2 * i + 1]);
    quads[2 + i] = _mm_unpackhi_epi16(pairs[2 * i], pairs[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = _mm_unpacklo_epi32(quads[2 * i], quads[2 * i + 1]);
    out[2 * i + 1] = _mm_unpackhi_epi32(quads[2 * i], quads[2 * i + 1]);
  }
}

// Sets the powers of two of a strip's scales times 2**-shift. Returns false if a scale is not in [least, most], except
// the scale of a group of zeros, whose codes equal `offset`.
inline bool set_powers(const u8* scale, i64 groups, int32_t shift, int32_t least, int32_t most, u8 offset,
                       GroupColumns* w) {
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
  for (i64 half = 0; half < kWidth; half += 8) {
    __m128i pairs[4];
    transpose_scales(scale + half * kStripGroups, pairs);
    for (int i = 0; i < 4; ++i) {
      smallest = _mm_min_epu8(smallest, pairs[i]);
      largest = _mm_max_epu8(largest, pairs[i]);
      const __m256i shifts = _mm256_set1_epi32(shift);
      const __m256i scales[2] = {_mm256_cvtepu8_epi32(pairs[i]), _mm256_cvtepu8_epi32(_mm_srli_si128(pairs[i], 8))};
      for (int g = 0; g < 2; ++g) {
        store(w[2 * i + g].powers + half, _mm256_slli_epi32(_mm256_sub_epi32(scales[g], shifts), 23));
      }
    }
  }
  const __m128i low = _mm_set1_epi8(char(std::min(least, 255))), high = _mm_set1_epi8(char(std::max(most, 0)));
  const __m128i usual = _mm_and_si128(_mm_cmpeq_epi8(_mm_max_epu8(smallest, low), smallest),
                                      _mm_cmpeq_epi8(_mm_min_epu8(largest, high), largest));
  if (least <= 254 && most >= 0 && _mm_movemask_epi8(usual) == 0xFFFF) return true;
  for (i64 g = 0; g < groups; ++g) {
    for (i64 q = 0; q < kWidth; ++q) {
      const int32_t value = scale[q * kStripGroups + g];
      if (value >= least && value <= most) continue;
      for (i64 i = 0; i < kGroup; ++i) {
        if (w[g].codes[i / 4 * kStepBytes + 4 * q + i % 4] != offset) return false;
      }
      if (value == 255) return false;
      w[g].powers[q] = kBias << 23;
    }
  }
  return true;
}

template <class Decoder>
void run_linear_int8(i64 begin, i64 end, void* context) {
  using Columns = IntegerColumns<Decoder>;
  LinearInt8& int8 = *static_cast<LinearInt8*>(context);
  const LinearCall& c = int8.linear.call;
  const i64 groups = int8.linear.groups;
  const Columns columns(c.table);
  const MultiplyStrip* kernels = strip_kernels<Columns::kWideSums>(c.integer_isa);
  // of scales whose products with those of x are powers of two in the normal numbers, and whose sums are finite
  const int32_t unit = kBias + columns.shift, least = std::max(0, unit + 1 - kBias - int8.exponents.min);
  const int32_t most = std::min({254, unit + kBias - kCodeMantissa - 1, unit + kLargestExponent - int8.exponents.max});
  const KeepSubnormals keep;
  Strip<Decoder> strip;
  GroupColumns w[kStripGroups];
  alignas(64) float totals[kFewRows * kWidth];
  for (i64 tile = begin; tile < end && !int8.unsupported; ++tile) {
    const i64 row = tile * kWidth;
    std::fill(totals, totals + c.m * kWidth, 0);
    for (i64 first = 0; first < groups; first += kStripGroups) {
      const i64 count = std::min(kStripGroups, groups - first);
      const i64 ahead = first + kStripsAhead * kStripGroups, next_row = row + ahead / groups * kWidth;
      strip.read(c, row, first, count);
      for (i64 g = 0; g < count; ++g) {
        columns.decode(strip.codes + g * Decoder::kBytes, strip.kBytes, w[g].codes);
        strip.prefetch(c, next_row, ahead % groups, g);
      }
      if (!set_powers(strip.scales, count, columns.shift, least, most, u8(columns.offset), w)) {
        int8.unsupported = true;
        return;
      }
      for (i64 m = 0, rows; m < c.m; m += rows) {
        const int log = c.m - m >= 8 ? 3 : c.m - m >= 4 ? 2 : c.m - m >= 2 ? 1 : 0;
        const CodeGroup* x[8];
        rows = 1 << log;
        for (i64 r = 0; r < rows; ++r) x[r] = int8.x.data() + (m + r) * groups + first;
        kernels[log](w, count, x, totals + m * kWidth);
      }
    }
    for (i64 m = 0; m < c.m; ++m) finish(int8.linear, m, row, std::min(kWidth, c.n - row), totals + m * kWidth);
  }
}

// Returns kUnsupported, and computes nothing, for other formats and values.
template <class Decoder>
int32_t linear_int8(const Linear& linear, ParallelFor parallel_for) {
  if constexpr (IntegerColumns<Decoder>::kSupported) {
    const LinearCall& c = linear.call;
    if (c.isa & AMX && c.dtype == BF16 && c.m > IntegerColumns<Decoder>::kRowsBeforeAmx) return kUnsupported;
    LinearInt8 int8(linear);
    encode_rows<IntegerColumns<Decoder>>(0, 1, &int8);  // if the first row has no codes, no thread starts
    if (!int8.unsupported && c.m > 1) {
      const i64 grain = std::max<i64>(1, (1 << 13) / c.k);
      if (const int32_t error = parallel_for(1, c.m, grain, encode_rows<IntegerColumns<Decoder>>, &int8)) return error;
    }
    if (int8.unsupported) return kUnsupported;
    const i64 grain = std::max<i64>(1, (1 << 18) / (kWidth * c.m * c.k));
    const int32_t error = parallel_for(0, (c.n + kWidth - 1) / kWidth, grain, run_linear_int8<Decoder>, &int8);
    return error ? error : int8.unsupported ? kUnsupported : 0;
  }
  return kUnsupported;
}

}  // namespace

#else

namespace {

template <class Decoder>
int32_t integer_isa_for(const float*) {
  return 0;
}
template <class Decoder>
int32_t linear_int8(const Linear&, ParallelFor) {
  return kUnsupported;
}

}  // namespace

#endif
