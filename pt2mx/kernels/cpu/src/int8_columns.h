// Codes of a weight as 8-bit integers, a group of kWidth rows at a time, for the kernels that multiply integers.
//
// kWidth rows are multiplied together, one in each lane, so a sum of a group needs no sum of lanes. Lane q of step s
// has four codes of row q, and the same four codes of x are in every lane:
//
//     codes, step s:    row 0             row 1             ...      row kWidth - 1
//                       k = 4s .. 4s+3    k = 4s .. 4s+3             k = 4s .. 4s+3

#pragma once

#include "int8_codes.h"
#include "isa.h"

// Defined if the compiler targets AVX512 and supports its extensions, or targets AVX2.
#if defined(PT2MX_HAVE_MATRIX_ISA) || (defined(__AVX2__) && !defined(__AVX512BW__))
#define PT2MX_HAVE_INT8

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define PT2MX_HAVE_VNNI
#endif
#if defined(__AVX512BW__)
#define VECTOR(name) _mm512_##name
#define TARGET_VBMI __attribute__((target("avx512vbmi")))
#else
#define VECTOR(name) _mm256_##name
#endif

namespace {

constexpr int kSteps = kGroup / 4;      // of a group
constexpr i64 kStepBytes = 4 * kWidth;  // codes of a step

#if defined(__AVX512BW__)
using Bytes = __m512i;
inline Bytes in_each_half(__m128i v) { return _mm512_broadcast_i32x4(v); }
// Chooses each byte by the sign of one in `sign`.
inline Bytes where_negative(Bytes sign, Bytes yes, Bytes no) {
  return _mm512_mask_mov_epi8(no, _mm512_movepi8_mask(sign), yes);
}
inline Bytes load_quarters(const u8* row, i64 stride) {
  const u8* upper = row + 8 * stride;
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(row)), load128(row + 4 * stride), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(upper)), load128(upper + 4 * stride), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#else
using Bytes = __m256i;
inline Bytes in_each_half(__m128i v) { return _mm256_broadcastsi128_si256(v); }
inline Bytes where_negative(Bytes sign, Bytes yes, Bytes no) { return _mm256_blendv_epi8(no, yes, sign); }
inline Bytes load_quarters(const u8* row, i64 stride) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(row)), load128(row + 4 * stride), 1);
}
#endif

// sum += products of codes, four in each lane. In assembly, so that one function serves both instructions.
inline __attribute__((always_inline)) void dpbusd(Bytes& sum, Bytes w, Bytes x) {
#if defined(PT2MX_HAVE_VNNI) && defined(__AVX512BW__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "vm"(x));
#elif defined(PT2MX_HAVE_VNNI)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "xm"(x));
#endif
}

// Returns the bytes of a table that the lower six bits of each index choose, by VPERMB.
inline __attribute__((always_inline)) Bytes permute(Bytes table, Bytes indices) {
#if defined(__AVX512BW__)
  asm("vpermb %1, %0, %0" : "+v"(indices) : "v"(table));
#endif
  return indices;
}

// Returns codes of x in the order of a decoder with kEvenOdd.
inline __m256i to_even_odd(__m256i codes) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  return _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(order));
}

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

template <>
struct IntegerColumns<Nibbles> : IntegerTable {
  static constexpr bool kSupported = true, kEvenOdd = true;
  static constexpr int kWideSums = 4, kRowVectors = 2;
  Bytes table;

  explicit IntegerColumns(const float* values, bool is_signed = false) : IntegerTable(values, 16, is_signed) {
    u8 codes[16];
    get_codes(values, codes);
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
  // The lower and the upper nibbles.
  template <int kIsa>
  void decode_row(const u8* data, Bytes* out) const {
    const Bytes mask = VECTOR(set1_epi8)(15), pairs = load<Bytes>(data), upper = VECTOR(srli_epi16)(pairs, 4);
    if constexpr (kIsa & VPERMB) {  // its 64 bytes repeat the table, whatever the bits above a nibble
      out[0] = permute(table, pairs);
      out[1] = permute(table, upper);
    } else {
      out[0] = VECTOR(shuffle_epi8)(table, pairs & mask);
      out[1] = VECTOR(shuffle_epi8)(table, upper & mask);
    }
  }
};

// Floats of 6 bits. Four codes take three bytes, which are moved to each 32 bits and split.
template <>
struct IntegerColumns<Halves<2, 3, false>> : IntegerTable {
  static constexpr bool kSupported = true, kEvenOdd = false;
  static constexpr int kWideSums = 1, kRowVectors = 1;

  // Reads 12 of the 24 bytes of a group in each row, three of them to each 32 bits, in this order.
  static void load_triples(const u8* data, i64 stride, int half, __m128i order, Bytes* columns) {
    const Bytes spread = in_each_half(_mm_add_epi8(order, _mm_set1_epi8(char(4 * half))));
    load_columns(data + 8 * half, stride, columns, [&](Bytes row) { return VECTOR(shuffle_epi8)(row, spread); });
  }

  // The lower five bits of a code choose a magnitude of two tables, the sixth is the sign.
  Bytes tables[2];

  explicit IntegerColumns(const float* values, bool is_signed = false) : IntegerTable(values, 64, is_signed) {
    for (int t = 0; t < 2; ++t) {
      u8 codes[16];
      for (int i = 0; i < 16; ++i) codes[i] = u8(integer(values[16 * t + i]));
      tables[t] = in_each_half(load128(codes));
    }
#if defined(__AVX512BW__)
    u8 codes[64];
    get_codes(values, codes);
    table = load<Bytes>(codes);
#endif
  }
  // Where `split` expects the 12 bytes of 16 codes: the lower and the upper two codes of three bytes.
  const __m128i kOrder = _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11);
  Bytes split(Bytes words) const {  // a shift of each 16 bits, as in split_pairs
    const Bytes even = VECTOR(srli_epi16)(VECTOR(mullo_epi16)(words, VECTOR(set1_epi32)(1 << 10 | 1 << 22)), 10);
    const Bytes odd = VECTOR(srli_epi16)(VECTOR(mullo_epi16)(words, VECTOR(set1_epi32)(1 << 4 | 1 << 16)), 2);
    const Bytes codes = even | (odd & VECTOR(set1_epi16)(0x3F00));
    const Bytes low = VECTOR(shuffle_epi8)(tables[0], codes), high = VECTOR(shuffle_epi8)(tables[1], codes);
    const Bytes magnitudes = where_negative(VECTOR(slli_epi16)(codes, 3), high, low);
    const Bytes signed_codes =
        where_negative(VECTOR(slli_epi16)(codes, 2), VECTOR(sub_epi8)(Bytes{}, magnitudes), magnitudes);
    return VECTOR(add_epi8)(signed_codes, VECTOR(set1_epi8)(char(offset)));
  }
  // Reads 12 bytes to each 16 bytes, and four more.
  static Bytes load_parts(const u8* data) { return load_quarters(data, 12 / 4); }

  void decode(const u8* data, i64 stride, u8* out) const {
#if defined(__AVX512BW__)
    if (has_avx512_vbmi()) return decode_vbmi(data, stride, out);
#endif
    for (int half = 0; half < 2; ++half) {
      Bytes columns[4];
      load_triples(data, stride, half, kOrder, columns);
      for (const Bytes& words : columns) {
        store(out, split(words));
        out += kStepBytes;
      }
    }
  }
  template <int kIsa>
  void decode_row(const u8* data, Bytes* out) const {
    *out = split(VECTOR(shuffle_epi8)(load_parts(data), in_each_half(kOrder)));
  }
#if defined(__AVX512BW__)  // AVX512_VBMI looks up 64 codes, and reads them at any bit
  Bytes table;

  TARGET_VBMI NOINLINE void decode_vbmi(const u8* data, i64 stride, u8* out) const {
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
#endif
};

template <>
struct IntegerColumns<Int8> {
  static constexpr bool kSupported = true, kEvenOdd = false;
  static constexpr int kWideSums = 0, kRowVectors = 1;
  static constexpr int32_t shift = kCodeMantissa, most = 127;
  const int32_t offset;
  explicit IntegerColumns(const float*, bool is_signed = false) : offset(is_signed ? 0 : 128) {}
  bool fits(int) const { return true; }
  void decode(const u8* data, i64 stride, u8* out) const {
    for (int half = 0; half < 2; ++half) {
      Bytes columns[4];
      load_columns(data + 16 * half, stride, columns, [](Bytes row) { return row; });
      for (const Bytes& codes : columns) {
        store(out, codes ^ VECTOR(set1_epi8)(char(offset)));
        out += kStepBytes;
      }
    }
  }
  template <int kIsa>
  void decode_row(const u8* data, Bytes* out) const {
    *out = load<Bytes>(data) ^ VECTOR(set1_epi8)(char(offset));
  }
};

// A group of kWidth rows of the weight.
struct GroupColumns {
  alignas(64) u8 codes[kSteps * kStepBytes];
  int32_t powers[kWidth];  // as in CodeGroup
};

}  // namespace

#endif
