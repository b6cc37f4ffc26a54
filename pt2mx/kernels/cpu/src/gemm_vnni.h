// The GEMM of bfloat16 values by AVX512_VNNI, for x and weights whose values are 8-bit integer codes times one power of
// two per group. An instruction adds four products to each sum, twice as many as with AVX512_BF16.
//
// x is given as values. The kernel converts them to codes, and computes nothing if a value has no code. Sums of a group
// are exact; sums of a row are in fp32, in one order. The powers of two of x and of the weight are multiplied by adding
// their exponent bits as integers. If the result could be no normal number, or the weight has a NaN, the kernel
// computes nothing either. The caller then uses another kernel.

#pragma once

#include <atomic>
#include <mutex>

#include "epilogue.h"
#include "gemm_microkernel.h"
#include "int8_codes.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kVnniRows = 5;            // rows of x of a micro-tile: with kNR columns, 20 registers of sums
constexpr i64 kVnniSteps = kGroup / 4;  // instructions for a group

// ---- the weight ----

// Decodes a group to 32 integers plus 128, for an instruction that multiplies unsigned by signed bytes. Codes of 4 bits
// look up one table of 16 integers, codes of 6 bits four.
template <int Bits>
struct VnniTable {
  static constexpr bool kSupported = true;
  __m256i tables[1 << (Bits - 4)];
  int32_t shift = 0;  // the integers are values times 2**shift

  explicit VnniTable(const float* table) {
    while (shift < 8 && !are_codes(table)) ++shift;
    for (int t = 0; t < 1 << (Bits - 4); ++t) {
      u8 codes[16];
      for (int i = 0; i < 16; ++i) codes[i] = u8(128 + int32_t(table[16 * t + i] * (1 << shift)));
      tables[t] = _mm256_broadcastsi128_si256(load128(codes));
    }
  }
  bool valid() const { return shift < 8; }
  __m256i decode(const u8* data) const {
    if (Bits == 4) {
      const __m128i bytes = load128(data), low = _mm_and_si128(bytes, _mm_set1_epi8(15));
      const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
      const __m256i first = _mm256_castsi128_si256(_mm_unpacklo_epi8(low, high));
      return _mm256_shuffle_epi8(tables[0], _mm256_inserti128_si256(first, _mm_unpackhi_epi8(low, high), 1));
    }
    __m256i even, odd;
    split_pairs<6>(data, &even, &odd);
    const __m256i codes = _mm256_or_si256(_mm256_srli_epi16(even, 10),
                                          _mm256_and_si256(_mm256_srli_epi16(odd, 2), _mm256_set1_epi16(0x3F00)));
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i top = _mm256_and_si256(codes, _mm256_set1_epi8(48));
    __m256i out = _mm256_shuffle_epi8(tables[0], index);
    for (int t = 1; t < 1 << (Bits - 4); ++t) {
      out =
          _mm256_mask_shuffle_epi8(out, _mm256_cmpeq_epi8_mask(top, _mm256_set1_epi8(char(16 * t))), tables[t], index);
    }
    return out;
  }

 private:
  bool are_codes(const float* table) const {
    return std::all_of(table, table + (1 << Bits), [&](float value) {
      const float code = value * (1 << shift);
      return code >= -128 && code <= 127 && code == float(int32_t(code));
    });
  }
};

template <class Decoder>
struct VnniDecoderOf {
  static constexpr bool kSupported = false;
};
template <>
struct VnniDecoderOf<Nibbles> : VnniTable<4> {
  using VnniTable<4>::VnniTable;
};
template <>
struct VnniDecoderOf<Halves<2, 3, false>> : VnniTable<6> {
  using VnniTable<6>::VnniTable;
};
template <>
struct VnniDecoderOf<Int8> {
  static constexpr bool kSupported = true;
  static constexpr int32_t shift = kCodeMantissa;
  explicit VnniDecoderOf(const float*) {}
  bool valid() const { return true; }
  __m256i decode(const u8* data) const { return _mm256_xor_si256(load256(data), _mm256_set1_epi8(char(128))); }
};

// True if the processor has AVX512_VNNI, and the values of `table` are integers times one power of two.
template <class Decoder>
bool can_use_vnni(const float* table) {
  if constexpr (VnniDecoderOf<Decoder>::kSupported) return has_avx512_vnni() && VnniDecoderOf<Decoder>(table).valid();
  return false;
}

// A group of 16 rows of the weight, which are columns of the result. An instruction multiplies four codes of each
// column with the same four codes of x, and adds the products to one sum a column, so four values of k are adjacent:
//
//     codes, step q:    column 0          column 1          ...      column 15
//                       k = 4q .. 4q+3    k = 4q .. 4q+3             k = 4q .. 4q+3
struct CodePanel {
  u8 codes[kTileElems];       // (kVnniSteps, kTileRows columns, 4)
  int32_t powers[kTileRows];  // of two, as integers to be added to the bits of a float
};

// Decodes rows [row, last) of the weight, rounded out to multiples of 32, to panels: (16 rows each, groups). Returns
// false if a sum with them could leave the normal numbers.
template <class Decoder>
bool decode_panels(const Linear& linear, i64 row, i64 last, ExponentRange x, CodePanel* panels) {
  const VnniDecoderOf<Decoder> decoder(linear.call.table);
  const i64 groups = linear.tap_groups, taps = linear.im2col.taps;
  ExponentRange range;
  bool finite = true;
  const i64 end_of_pair = (last + kNR - 1) / kNR * (kNR / kTileRows);
  for (i64 part = row / kTileRows * taps; part < end_of_pair * taps; ++part, panels += groups) {
    const LinearCall c = linear.call_of(part % taps);
    for (i64 begin = 0; begin < groups;
         begin += 2) {  // the codes of two groups of 16 rows are a (16, 16) matrix of 32 bits
      alignas(64) u8 matrix[2 * kTileElems];
      const i64 end = std::min(begin + 2, groups);
      for (i64 q = 0; q < kTileRows; ++q) {
        const i64 at = std::min(part / taps * kTileRows + q, c.n - 1);
        u8 padded[Decoder::kBytes];
        for (i64 g = begin; g < end; ++g) {
          const u8* data = c.data + at * c.row_bytes + g * Decoder::kBytes;
          __builtin_prefetch(data + kTileRows * c.row_bytes);
          if ((g + 1) * kGroup > c.k) data = last_group<Decoder>(c, at, padded);
          const u8 scale = c.scale[at * c.row_blocks + g / (c.block / kGroup)];
          const __m256i values = decoder.decode(data);
          store(matrix + (2 * q + g - begin) * kGroup, values);
          const bool zeros = !_mm256_cmpneq_epi8_mask(values, _mm256_set1_epi8(char(128)));
          const int32_t exponent = zeros ? 0 : scale - kBias - decoder.shift;
          range.add(exponent);
          finite &= scale != 255;
          panels[g].powers[q] = (exponent + kBias) * (1 << 23);
        }
      }
      transpose(reinterpret_cast<u16*>(matrix));
      for (i64 g = begin; g < end; ++g) std::memcpy(panels[g].codes, matrix + (g - begin) * kTileElems, kTileElems);
    }
  }
  return finite && range.max < kBias - kCodeMantissa && x.min + range.min > -kBias &&
         x.max + range.max <= kLargestExponent;
}

// ---- x ----

// Writes a group of x as codes times 2**exponent. Returns false if a value has no code.
inline bool to_codes(const u16* x, CodeGroup* out, int32_t* exponent) {
  const __m512i values = _mm512_loadu_si512(x), magnitudes = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
  // treat -2**n as the next smaller magnitude, because -128 is a code and 128 is not
  const __m512i keys = _mm512_subs_epu16(magnitudes, _mm512_srli_epi16(values, 15));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(keys), _mm512_extracti64x4_epi64(keys, 1));
  const __m128i largest = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i inverted = _mm_minpos_epu16(_mm_xor_si128(largest, _mm_set1_epi16(-1)));
  const int32_t biased = (~_mm_cvtsi128_si32(inverted) & 0xFFFF) >> 7;
  if (biased <= kCodeMantissa) {  // its power of two would be subnormal
    *exponent = 0;
    *out = {};
    return !_mm512_test_epi16_mask(magnitudes, magnitudes);
  }
  if (biased >= 2 * kBias) return false;  // -Inf counts as 2**127
  *exponent = biased - kBias - kCodeMantissa;
  const __m512 factor = _mm512_set1_ps(from_bits((biased - kCodeMantissa) << 23));
  const __m512 inverse = _mm512_set1_ps(from_bits((2 * kBias + kCodeMantissa - biased) << 23));
  __m512i total = _mm512_setzero_si512();
  __mmask16 exact = 0xFFFF;
  for (int h = 0; h < 2; ++h) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + h * kTileRows));
    const __m512 part = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part, inverse));
    exact &= _mm512_cmp_ps_mask(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), factor), part, _CMP_EQ_OQ);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes + h * kTileRows), _mm512_cvtepi32_epi8(whole));
    total = _mm512_add_epi32(total, whole);
  }
  out->power = *exponent * (1 << 23);
  out->offset = -128 * _mm512_reduce_add_epi32(total);
  return exact == 0xFFFF;
}

struct GemmVnni {
  const Linear& linear;
  Tasks tasks;
  const i64 pixels, groups;  // of a pixel
  const Scratch<OF_X> scratch;
  CodeGroup* const pixel_groups;  // (pixels + 1, groups); the last pixel is zeros
  ExponentRange exponents;        // of x
  std::mutex mutex;               // of `exponents`
  std::atomic<bool> unsupported{false};

  explicit GemmVnni(const Linear& linear)
      : linear(linear),
        tasks(linear.call),
        pixels(linear.im2col.pixels),
        groups(linear.tap_groups),
        scratch((pixels + 1) * groups * i64(sizeof(CodeGroup))),
        pixel_groups(reinterpret_cast<CodeGroup*>(scratch.data())) {
    std::fill(pixel_groups + pixels * groups, pixel_groups + (pixels + 1) * groups, CodeGroup{});
    if (!linear.im2col.is_matrix()) exponents.add(0);  // of the pixel of zeros
  }

  // Returns false if a value of a pixel has no code.
  bool encode_pixel(i64 pixel, ExponentRange& exponents) {
    const i64 k = linear.call.k;
    const u16* x = static_cast<const u16*>(linear.call.x) + pixel * k;
    CodeGroup* out = pixel_groups + pixel * groups;
    for (i64 first = 0; first < k; first += kGroup, ++out) {
      const u16* values = x + first;
      u16 padded[kGroup] = {};
      if (k - first < kGroup) values = static_cast<const u16*>(std::memcpy(padded, values, 2 * (k - first)));
      int32_t exponent;
      if (!to_codes(values, out, &exponent)) return false;
      exponents.add(exponent);
    }
    return true;
  }

  // Points `out`: (taps, kVnniRows) to the pixels of up to kVnniRows rows from `row` on, and writes the rows' positions
  // in the result. Leaves the pointers of missing rows unchanged.
  void find_pixels(i64 row, i64 n, const CodeGroup** out, i64* positions) const {
    linear.im2col.each_tap(row, n, positions, [&](i64 r, i64 count, i64 tap, i64 pixel, i64 step) {
      const CodeGroup* at = pixel < 0 ? zeros() : pixel_groups + pixel * groups;
      step *= pixel < 0 ? 0 : groups;
      for (i64 i = 0; i < count; ++i, at += step) out[tap * kVnniRows + r + i] = at;
    });
  }

  const CodeGroup* zeros() const { return pixel_groups + pixels * groups; }
};

void encode_pixels(i64 begin, i64 end, void* context) {
  GemmVnni& gemm = *static_cast<GemmVnni*>(context);
  const KeepSubnormals keep;
  ExponentRange exponents;
  for (i64 pixel = begin; pixel < end && !gemm.unsupported; ++pixel) {
    if (!gemm.encode_pixel(pixel, exponents)) gemm.unsupported = true;
  }
  const std::lock_guard<std::mutex> lock(gemm.mutex);
  gemm.exponents.add(exponents);
}

// ---- the GEMM ----

// sums: (kVnniRows, kNR) = x: (taps, kVnniRows) pointers to pixels of `groups` groups, times w: (2, taps, groups). It
// sums a few groups at a time, because a sum of partial sums is more exact. Skips a tap if all its pixels are
// `outside`.
__attribute__((target("avx512vnni"))) NOINLINE void microkernel_vnni(const CodeGroup* const* x, const CodePanel* w,
                                                                     i64 taps, i64 groups, const CodeGroup* outside,
                                                                     float* sums) {
  constexpr int kHalves = kNR / kTileRows;
  const i64 panels = taps * groups;
  std::memset(sums, 0, kVnniRows * kNR * sizeof(float));
  for (i64 tap = 0, g = 0; tap < taps;) {
    __m512 strip[kVnniRows][kHalves] = {};
    for (i64 left = kStripGroups; left && tap < taps;) {
      const CodeGroup* row[kVnniRows];
      bool inside = false;
      for (int r = 0; r < kVnniRows; ++r) {
        inside |= x[tap * kVnniRows + r] != outside;
        row[r] = x[tap * kVnniRows + r] + g;
      }
      const i64 n = std::min(groups - g, left);
      const CodePanel* panel = w;
      w += n;
      for (i64 i = 0; i < n && inside; ++i, ++panel) {
        __m512i sum[kVnniRows][kHalves];
        for (int r = 0; r < kVnniRows; ++r) {
          for (int h = 0; h < kHalves; ++h) sum[r][h] = _mm512_set1_epi32(row[r][i].offset);
        }
        for (int q = 0; q < kVnniSteps; ++q) {
          __m512i codes[kHalves];
          for (int h = 0; h < kHalves; ++h) codes[h] = _mm512_loadu_si512(panel[h * panels].codes + q * 4 * kTileRows);
          for (int r = 0; r < kVnniRows; ++r) {
            const __m512i values = _mm512_set1_epi32(load<int32_t>(row[r][i].codes + 4 * q));
            for (int h = 0; h < kHalves; ++h) sum[r][h] = _mm512_dpbusd_epi32(sum[r][h], codes[h], values);
          }
        }
        for (int h = 0; h < kHalves; ++h) {
          const __m512i powers = _mm512_loadu_si512(panel[h * panels].powers);
          for (int r = 0; r < kVnniRows; ++r) {
            const __m512i power = _mm512_add_epi32(powers, _mm512_set1_epi32(row[r][i].power));
            strip[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][h]), _mm512_castsi512_ps(power), strip[r][h]);
          }
        }
      }
      left -= n;
      g += n;
      if (g == groups) ++tap, g = 0;
    }
    for (int r = 0; r < kVnniRows; ++r) {
      for (int h = 0; h < kHalves; ++h) {
        float* total = sums + r * kNR + h * kTileRows;
        _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), strip[r][h]));
      }
    }
  }
}

template <class Decoder>
void run_gemm_vnni(i64, i64, void* context) {
  GemmVnni& gemm = *static_cast<GemmVnni*>(context);
  const Linear& linear = gemm.linear;
  const LinearCall& c = linear.call;
  const i64 panels = (c.task_columns + kNR - 1) / kNR * (kNR / kTileRows);
  const KeepSubnormals keep;
  const Scratch<OF_WEIGHT> scratch(panels * linear.groups * i64(sizeof(CodePanel)));
  CodePanel* const w = reinterpret_cast<CodePanel*>(scratch.data());
  std::vector<const CodeGroup*> x(linear.im2col.taps * kVnniRows, gemm.pixel_groups);
  alignas(64) float sums[kVnniRows * kNR];
  i64 positions[kVnniRows];
  i64 decoded = -1;
  for (Task task; !gemm.unsupported && gemm.tasks.take(task); decoded = task.first) {
    const auto [top, bottom, first, last] = task;
    if (decoded != first && !decode_panels<Decoder>(linear, first, last, gemm.exponents, w)) {
      gemm.unsupported = true;
      return;
    }
    for (i64 m = top; m < bottom; m += kVnniRows) {
      const i64 rows = std::min(kVnniRows, bottom - m);
      gemm.find_pixels(m, rows, x.data(), positions);
      for (i64 n = first; n < last; n += kNR) {
        const CodePanel* panel = w + (n - first) / kTileRows * linear.groups;
        microkernel_vnni(x.data(), panel, linear.im2col.taps, gemm.groups, gemm.zeros(), sums);
        finish_micro_tile(linear, positions, rows, n, std::min(kNR, last - n), sums);
      }
    }
  }
}

template <class Decoder>
int32_t gemm_vnni(const Linear& linear, ParallelFor parallel_for) {
  if constexpr (VnniDecoderOf<Decoder>::kSupported) {
    const LinearCall& c = linear.call;
    GemmVnni gemm(linear);
    const i64 first = std::min(kVnniRows, gemm.pixels), grain = std::max<i64>(1, (1 << 16) / c.k);
    encode_pixels(0, first, &gemm);  // if the first pixels have no codes, no thread starts
    if (!gemm.unsupported && gemm.pixels > first) {
      if (const int32_t error = parallel_for(first, gemm.pixels, grain, encode_pixels, &gemm)) return error;
    }
    if (gemm.unsupported) return kUnsupported;
    const int32_t error = parallel_for(0, gemm.tasks.count(), 1, run_gemm_vnni<Decoder>, &gemm);
    return error ? error : gemm.unsupported ? kUnsupported : 0;
  }
  return kUnsupported;
}

}  // namespace

#endif
