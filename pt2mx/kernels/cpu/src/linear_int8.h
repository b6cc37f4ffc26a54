// linear_mx of up to 32 rows of x whose values, like the weight's, are 8-bit integers times one power of two per group:
// by vpmaddubsw of AVX2 and AVX-512, or by vpdpbusd of AVX_VNNI and AVX512_VNNI.
//
// kWidth rows of the weight are multiplied together, one in each lane, so a sum of a group needs no sum of lanes. Lane
// q of step s has four codes of row q, and the same four codes of x are in every lane:
//
//     codes, step s:    row 0             row 1             ...      row kWidth - 1
//                       k = 4s .. 4s+3    k = 4s .. 4s+3             k = 4s .. 4s+3
//
// Codes are decoded once for all rows of x, a strip of groups at a time. Sums of a group are exact, one multiply-add a
// group applies both scales, and sums of a row are in fp32, in the order of gemm_vnni.h: results have the same bits
// with every instruction set.

#pragma once

#include <atomic>
#include <mutex>

#include "int8_codes.h"
#include "isa.h"
#include "linear.h"

#if defined(__AVX512BW__) || defined(__AVX2__)

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define PT2MX_HAVE_VNNI
#include <cpuid.h>
#endif
#if defined(__AVX512BW__)
#define VECTOR(name) _mm512_##name
#define TARGET_VNNI __attribute__((target("avx512vnni")))
#define TARGET_VBMI __attribute__((target("avx512vbmi")))
#define DPBUSD _mm512_dpbusd_epi32
#else
#define VECTOR(name) _mm256_##name
#define TARGET_VNNI __attribute__((target("avxvnni")))
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif

namespace {

constexpr int kSteps = kGroup / 4;      // of a group
constexpr i64 kStepBytes = 4 * kWidth;  // codes of a step
constexpr i64 kMaxCode = 128;           // the largest magnitude of a code of x

#if defined(__AVX512BW__)
using Bytes = __m512i;
inline Bytes in_each_half(__m128i v) { return _mm512_broadcast_i32x4(v); }
inline Bytes load_quarters(const u8* row, i64 stride) {
  const u8* upper = row + 8 * stride;
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(row)), load128(row + 4 * stride), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(upper)), load128(upper + 4 * stride), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#else
using Bytes = __m256i;
inline Bytes in_each_half(__m128i v) { return _mm256_broadcastsi128_si256(v); }
inline Bytes load_quarters(const u8* row, i64 stride) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(row)), load128(row + 4 * stride), 1);
}
#endif

// Reads 16 bytes of kWidth rows, `stride` bytes apart, and writes to out[i] the i-th 32 bits of each row, as they lie
// or after `expand`.
template <class Expand>
inline void load_columns(const u8* data, i64 stride, Bytes* out, Expand expand) {
  Bytes row[4];
  for (int i = 0; i < 4; ++i) row[i] = expand(load_quarters(data + i * stride, stride));
  const Bytes low[2] = {VECTOR(unpacklo_epi32)(row[0], row[1]), VECTOR(unpacklo_epi32)(row[2], row[3])};
  const Bytes high[2] = {VECTOR(unpackhi_epi32)(row[0], row[1]), VECTOR(unpackhi_epi32)(row[2], row[3])};
  out[0] = VECTOR(unpacklo_epi64)(low[0], low[1]);
  out[1] = VECTOR(unpackhi_epi64)(low[0], low[1]);
  out[2] = VECTOR(unpacklo_epi64)(high[0], high[1]);
  out[3] = VECTOR(unpackhi_epi64)(high[0], high[1]);
}

// ---- the weight: a decoder writes the codes of a group of kWidth rows, as integers plus `offset` ----
//
//   kWideSums     vpmaddubsw: the number of steps whose sums of products fit 16 bits; 0 if not even one does
//   kEvenOdd      true if a step has every second code of eight
//   shift         the integers are values times 2**shift; 8 if they are no integers

template <class Decoder>
struct IntegerColumns {
  static constexpr bool kSupported = false;
};

// What codes of 4 and 6 bits share: the integers of a table.
struct IntegerTable {
  int32_t shift = 0, offset = 0;

  // True if the integers, plus `offset`, times codes of x fit 16 bits in sums of 2 * steps products.
  bool fits(int steps) const { return 2 * steps * kMaxCode * (most_ + offset) <= INT16_MAX; }

 protected:
  int32_t most_ = 0;
  int32_t integer(float value) const { return int32_t(value * float(1 << shift)); }

  IntegerTable(const float* table, int n) {
    while (shift < 8 && !std::all_of(
                            table, table + n,
                            [&](float value) {
                              return std::abs(value) * float(1 << shift) <= 127 &&
                                     value * float(1 << shift) == float(integer(value));
                            })) {
      ++shift;
    }
    if (shift == 8) return;
    most_ = integer(*std::max_element(table, table + n));
    offset = -integer(*std::min_element(table, table + n));
  }
};

template <>
struct IntegerColumns<Nibbles> : IntegerTable {
  static constexpr bool kSupported = true, kEvenOdd = true;
  static constexpr int kWideSums = 4;
  Bytes table;

  explicit IntegerColumns(const float* values) : IntegerTable(values, 16) {
    u8 codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = u8(offset + integer(values[i]));
    table = in_each_half(load128(codes));
  }
  void decode(const u8* data, i64 stride, u8* out) const {
    const Bytes mask = VECTOR(set1_epi8)(15);
    Bytes columns[4];
    load_columns(data, stride, columns, [](Bytes row) { return row; });
    for (const Bytes& pairs : columns) {
      store(out, VECTOR(shuffle_epi8)(table, pairs & mask));
      store(out + kStepBytes, VECTOR(shuffle_epi8)(table, VECTOR(srli_epi16)(pairs, 4) & mask));
      out += 2 * kStepBytes;
    }
  }
};

// Floats of 6 bits. Four codes take three bytes, which are moved to each 32 bits and split.
template <>
struct IntegerColumns<Halves<2, 3, false>> : IntegerTable {
  static constexpr bool kSupported = true, kEvenOdd = false;
  static constexpr int kWideSums = 1;

  // Reads 12 of the 24 bytes of a group in each row, three of them to each 32 bits, in this order.
  static void load_triples(const u8* data, i64 stride, int half, __m128i order, Bytes* columns) {
    const Bytes spread = in_each_half(_mm_add_epi8(order, _mm_set1_epi8(char(4 * half))));
    load_columns(data + 8 * half, stride, columns, [&](Bytes row) { return VECTOR(shuffle_epi8)(row, spread); });
  }

#if defined(__AVX512BW__)  // AVX512_VBMI looks up 64 codes, and reads them at any bit
  Bytes table;

  explicit IntegerColumns(const float* values) : IntegerTable(values, 64) {
    if (!has_avx512_vbmi()) shift = 8;
    u8 codes[64];
    for (int i = 0; i < 64; ++i) codes[i] = u8(offset + integer(values[i]));
    table = load<Bytes>(codes);
  }
  TARGET_VBMI NOINLINE void decode(const u8* data, i64 stride, u8* out) const {
    const Bytes bits = _mm512_set1_epi64(0x322C2620120C0600);
    for (int half = 0; half < 2; ++half) {
      Bytes columns[4];
      load_triples(data, stride, half, _mm_setr_epi8(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11), columns);
      for (const Bytes& triples : columns) {
        store(out, _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(bits, triples), table));
        out += kStepBytes;
      }
    }
  }
#else  // the lower five bits of a code choose a magnitude of two tables, the sixth is the sign
  Bytes tables[2];

  explicit IntegerColumns(const float* values) : IntegerTable(values, 64) {
    for (int t = 0; t < 2; ++t) {
      u8 codes[16];
      for (int i = 0; i < 16; ++i) codes[i] = u8(integer(values[16 * t + i]));
      tables[t] = in_each_half(load128(codes));
    }
  }
  void decode(const u8* data, i64 stride, u8* out) const {
    const Bytes plus = _mm256_set1_epi8(char(offset));
    for (int half = 0; half < 2; ++half) {
      Bytes columns[4];
      load_triples(data, stride, half, _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11), columns);
      for (const Bytes& words : columns) {  // a shift of each 16 bits, as in split_pairs
        const Bytes even = _mm256_srli_epi16(_mm256_mullo_epi16(words, _mm256_set1_epi32(1 << 10 | 1 << 22)), 10);
        const Bytes odd = _mm256_srli_epi16(_mm256_mullo_epi16(words, _mm256_set1_epi32(1 << 4 | 1 << 16)), 2);
        const Bytes codes = even | (odd & _mm256_set1_epi16(0x3F00));
        const Bytes low = _mm256_shuffle_epi8(tables[0], codes), high = _mm256_shuffle_epi8(tables[1], codes);
        const Bytes magnitudes = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(codes, 3));
        store(out, _mm256_add_epi8(plus, _mm256_sign_epi8(magnitudes, _mm256_slli_epi16(codes, 2))));
        out += kStepBytes;
      }
    }
  }
#endif
};

template <>
struct IntegerColumns<Int8> {
  static constexpr bool kSupported = true, kEvenOdd = false;
  static constexpr int kWideSums = 0;
  static constexpr int32_t shift = kCodeMantissa, offset = 128;
  explicit IntegerColumns(const float*) {}
  bool fits(int) const { return true; }
  void decode(const u8* data, i64 stride, u8* out) const {
    for (int half = 0; half < 2; ++half) {
      Bytes columns[4];
      load_columns(data + 16 * half, stride, columns, [](Bytes row) { return row; });
      for (const Bytes& codes : columns) {
        store(out, codes ^ VECTOR(set1_epi8)(char(128)));
        out += kStepBytes;
      }
    }
  }
};

// A group of kWidth rows of the weight.
struct GroupColumns {
  alignas(64) u8 codes[kSteps * kStepBytes];
  int32_t powers[kWidth];  // as in CodeGroup
};

// ---- sums of a strip: totals: (R, kWidth) += x: R rows of `groups` groups, times w: (groups) ----

// strip += the sums of a group times its powers of two.
template <int R>
inline __attribute__((always_inline)) void add_group(const Bytes* sums, const GroupColumns& w,
                                                     const CodeGroup* const* x, i64 g, Floats* strip) {
  const Ints powers = load<Ints>(w.powers);
  for (int r = 0; r < R; ++r) {
    strip[r] = fma(Floats(VECTOR(cvtepi32_ps)(sums[r])), Floats(powers + x[r][g].power), strip[r]);
  }
}

template <int R>
inline __attribute__((always_inline)) void add_strip(const Floats* strip, float* totals) {
  for (int r = 0; r < R; ++r) store(totals + r * kWidth, load<Floats>(totals + r * kWidth) + strip[r]);
}

// By vpmaddubsw, which adds two products in 16 bits.
template <int kWideSums, int R>
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
          if (kWideSums) {
            wide[r] = VECTOR(add_epi16)(wide[r], VECTOR(maddubs_epi16)(codes, values));
          } else {  // the lower seven bits of a code, and the eighth
            wide[r] = VECTOR(maddubs_epi16)(codes & VECTOR(set1_epi8)(127), values);
            const Bytes eighth = VECTOR(srli_epi16)(codes, 7) & VECTOR(set1_epi8)(1);
            upper[r] = VECTOR(add_epi16)(upper[r], VECTOR(maddubs_epi16)(eighth, values));
          }
        }
      }
      for (int r = 0; r < R; ++r) sums[r] = VECTOR(add_epi32)(sums[r], VECTOR(madd_epi16)(wide[r], ones));
    }
    for (int r = 0; r < R && !kWideSums; ++r) {
      sums[r] = VECTOR(add_epi32)(sums[r], VECTOR(madd_epi16)(upper[r], VECTOR(set1_epi16)(128)));
    }
    add_group<R>(sums, w[g], x, g, strip);
  }
  add_strip<R>(strip, totals);
}

#if defined(PT2MX_HAVE_VNNI)

template <int R>
TARGET_VNNI NOINLINE void multiply_strip_vnni(const GroupColumns* w, i64 groups, const CodeGroup* const* x,
                                              float* totals) {
  Floats strip[R] = {};
  for (i64 g = 0; g < groups; ++g) {
    Bytes sums[R];
    for (int r = 0; r < R; ++r) sums[r] = VECTOR(set1_epi32)(x[r][g].offset);
    for (int s = 0; s < kSteps; ++s) {
      const Bytes codes = load<Bytes>(w[g].codes + s * kStepBytes);
      for (int r = 0; r < R; ++r) {
        sums[r] = DPBUSD(sums[r], codes, VECTOR(set1_epi32)(load<int32_t>(x[r][g].codes + 4 * s)));
      }
    }
    add_group<R>(sums, w[g], x, g, strip);
  }
  add_strip<R>(strip, totals);
}

inline bool has_vnni() {
#if defined(__AVX512BW__)
  return has_avx512_vnni();
#else
  static const bool available = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
  }();
  return available;
#endif
}

#else
inline bool has_vnni() { return false; }
#endif

using MultiplyStrip = void (*)(const GroupColumns*, i64, const CodeGroup* const*, float*);

// The kernels for one, two and four rows of x.
template <int kWideSums>
const MultiplyStrip* strip_kernels(int32_t isa) {
#if defined(PT2MX_HAVE_VNNI)
  static constexpr MultiplyStrip vnni[] = {multiply_strip_vnni<1>, multiply_strip_vnni<2>, multiply_strip_vnni<4>};
  if (isa & VPDPBUSD) return vnni;
#endif
  static constexpr MultiplyStrip plain[] = {multiply_strip<kWideSums, 1>, multiply_strip<kWideSums, 2>,
                                            multiply_strip<kWideSums, 4>};
  return plain;
}

// Bits of IntegerIsa that a weight with these values can use.
template <class Decoder>
int32_t integer_isa_for(const float* table) {
  using Columns = IntegerColumns<Decoder>;
  if constexpr (Columns::kSupported) {
    const Columns columns(table);
    if (columns.shift == 8) return 0;
    return (columns.fits(std::max(Columns::kWideSums, 1)) ? VPMADDUBSW : 0) | (has_vnni() ? VPDPBUSD : 0);
  }
  return 0;
}

// ---- the matmul ----

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
    for (i64 q = 0; q < kWidth; ++q) {  // codes after a row's last one meet zeros of x
      const i64 at = std::min(row + q, c.n - 1);
      std::memcpy(codes + q * kBytes, c.data + at * c.row_bytes + begin, std::min(kBytes, c.row_bytes - begin));
      for (i64 g = 0; g < kStripGroups; ++g) {
        scales[q * kStripGroups + g] = g < groups ? c.scale[at * c.row_blocks + (first + g) / per_block] : kBias;
      }
    }
  }
  // Prefetches, to the second-level cache, an eighth of what the next kWidth rows have here.
  static void prefetch(const LinearCall& c, i64 row, i64 first, i64 eighth) {
    const u8* data = c.data + (row + kWidth) * c.row_bytes + first * Decoder::kBytes;
    for (i64 q = eighth * kWidth / 8; q < (eighth + 1) * kWidth / 8; ++q) {
      for (i64 b = 0; b < kBytes; b += 64) __builtin_prefetch(data + q * c.row_bytes + b, 0, 2);
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
      strip.read(c, row, first, count);
      for (i64 g = 0; g < count; ++g) {
        columns.decode(strip.codes + g * Decoder::kBytes, strip.kBytes, w[g].codes);
        strip.prefetch(c, row, first, g);
      }
      if (!set_powers(strip.scales, count, columns.shift, least, most, u8(columns.offset), w)) {
        int8.unsupported = true;
        return;
      }
      for (i64 m = 0, rows; m < c.m; m += rows) {
        const int log = c.m - m >= 4 ? 2 : c.m - m >= 2 ? 1 : 0;
        const CodeGroup* x[4];
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

#undef VECTOR
#undef TARGET_VNNI
#undef TARGET_VBMI
#undef DPBUSD

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
