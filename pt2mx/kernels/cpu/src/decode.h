// Decodes the codes of a weight to values, a group of 32 at a time: in registers if the target has the instructions, by
// a table of all codes otherwise. The values equal those of pt2mx/kernels/reference.py to the bit.

#pragma once

#include "float_scale.h"
#include "packing.h"

namespace {

constexpr i64 kGroup = 32;  // codes that are decoded together; blocks are whole groups, except for Decoded
constexpr int kVectors = kGroup / kWidth;

// A scale as a product of two factors, for extreme scales: one factor alone could be subnormal or out of range.
struct TwoFactors {
  float first, second;
};
inline Floats operator*(Floats values, TwoFactors f) { return values * f.first * f.second; }

inline TwoFactors factors_of(u8 scale, int32_t shift) {  // 2**(scale - 127 + shift), NaN of the byte 255
  const int32_t exponent = scale - kBias + shift, half = exponent >> 1;
  return {from_bits((half + kBias) << 23), from_bits(scale == 255 ? 0x7FC00000 : (exponent - half + kBias) << 23)};
}

// The factors of both halves of a group: of scales with a significand, which 16 codes or more share.
struct HalfFactors {
  float first, second;
};

// A decoder has
//   kBytes       bytes of a group
//   kShift       its values are too small by 2**kShift; the factor makes up for that
//   kEvenOdd     true if it returns values in the order 0, 2, .. 30, 1, 3, .. 31, false if in the order of the codes
//   decode       the values of a group times a factor, a float, TwoFactors or HalfFactors
//   invalid      true if it met a code that it cannot decode

// Returns the index in the group of the i-th value that a decoder returns.
inline i64 index_in_group(bool even_odd, i64 i) { return even_odd ? i % (kGroup / 2) * 2 + i / (kGroup / 2) : i; }

// Reads values that decode_row has decoded.
struct Decoded {
  static constexpr i64 kBytes = 4 * kGroup;
  static constexpr int32_t kShift = 0;
  static constexpr bool kEvenOdd = false;
  explicit Decoded(const LinearCall&) {}
  template <class F>
  void decode(const u8* data, F, Floats* out) {
    for (int v = 0; v < kVectors; ++v) out[v] = load<Floats>(data + 4 * v * kWidth);
  }
  bool invalid() const { return false; }
};

// Decoders for vectors of AVX2 and AVX-512. On AArch64, dot_int8_neon.h defines their kBytes alone.
struct Nibbles;
template <int ExponentBits, int MantissaBits, bool Nan>
struct Halves;
struct Int8;

#if defined(__AVX512BW__) || defined(__AVX2__)

inline __m128i load128(const u8* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline __m256i load256(const u8* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

#if defined(__AVX512BW__)
inline void from_halves(__m256i halves, Floats* out) { out[0] = Floats(_mm512_cvtph_ps(halves)); }
#else
inline void from_halves(__m256i halves, Floats* out) {
  out[0] = Floats(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  out[1] = Floats(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}
#endif

template <bool EvenOdd, class F>
inline void scale(F f, Floats* values) {
  for (int v = 0; v < kVectors; ++v) values[v] = values[v] * f;
}
template <bool EvenOdd>
inline void scale(HalfFactors f, Floats* values) {
  const Floats halves[2] = {floats(f.first), floats(f.second)};
#if defined(__AVX512BW__)
  if (EvenOdd) {  // the first half of the lanes belongs to the first half of the codes
    const Floats both = Floats(_mm512_mask_mov_ps(__m512(halves[0]), 0xFF00, __m512(halves[1])));
    for (int v = 0; v < kVectors; ++v) values[v] = values[v] * both;
    return;
  }
#endif
  for (int v = 0; v < kVectors; ++v) values[v] = values[v] * halves[EvenOdd ? v % 2 : v / (kVectors / 2)];
}

// Every 4-bit format: looks up its 16 scaled values in registers.
struct Nibbles {
  static constexpr i64 kBytes = kGroup / 2;
  static constexpr int32_t kShift = 0;
  static constexpr bool kEvenOdd = true;
  bool invalid() const { return false; }

#if defined(__AVX512BW__)
  Floats table;
  explicit Nibbles(const LinearCall& call) : table(load<Floats>(call.table)) {}
  template <class F>
  void decode(const u8* data, F f, Floats* out) {
    const __m512i codes =
        _mm512_cvtepu8_epi32(load128(data));  // two in each lane; a look-up takes the lowest four bits
    const __m512 scaled = __m512(table * f);
    out[0] = Floats(_mm512_permutexvar_ps(codes, scaled));
    out[1] = Floats(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), scaled));
  }
#else
  Floats low, high;
  explicit Nibbles(const LinearCall& call) : low(load<Floats>(call.table)), high(load<Floats>(call.table + 8)) {}
  // Looks up three bits of a code in both halves of the table, and chooses a half by the fourth.
  static Floats look_up(Floats low, Floats high, __m256i codes) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return Floats(_mm256_blendv_ps(_mm256_permutevar8x32_ps(__m256(low), codes),
                                   _mm256_permutevar8x32_ps(__m256(high), codes), upper));
  }
  template <class F>
  void decode(const u8* data, F f, Floats* out) {
    const Floats low_scaled = low * f, high_scaled = high * f;
    for (int v = 0; v < 2; ++v) {
      const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + 8 * v)));
      out[v] = look_up(low_scaled, high_scaled, codes);
      out[2 + v] = look_up(low_scaled, high_scaled, _mm256_srli_epi32(codes, 4));
    }
  }
#endif
  void decode(const u8* data, HalfFactors f, Floats* out) {
    decode(data, 1.0f, out);
    scale<kEvenOdd>(f, out);
  }
};

// Splits 32 codes into those at even and at odd positions, each at the top of 16 bits, with any bits below it.
//
// Four codes of 6 bits take three bytes. `spread` puts two bytes into each word, and a multiplication by a power of two
// shifts one of the codes to the top:
//
//     byte          b2       b1       b0          even:   (b1 b0) << 10    aaaaaa..........
//                ddddddcc ccccbbbb bbaaaaaa               (b2 b1) << 6     cccccc..........
//                                                 odd:    (b1 b0) << 4     bbbbbb..........
//     words      b1 b0    ccccbbbb bbaaaaaa               (b2 b1) << 0     dddddd..........
//                b2 b1    ddddddcc ccccbbbb
template <int Bits>
inline void split_pairs(const u8* data, __m256i* even, __m256i* odd) {
  if (Bits == 8) {
    *odd = load256(data);
    *even = _mm256_slli_epi16(*odd, 8);
  } else {
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(data)), load128(data + 8), 1);
    const __m256i spread = _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11,  //
                                            4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15);
    const __m256i words = _mm256_shuffle_epi8(bytes, spread);
    *even = _mm256_mullo_epi16(words, _mm256_set1_epi32(1 << 10 | 1 << 22));  // by 10 and 6
    *odd = _mm256_mullo_epi16(words, _mm256_set1_epi32(1 << 4 | 1 << 16));    // by 4 and 0
  }
}

// Floats of 6 and 8 bits: their exponent and mantissa fields become those of an fp16. kShift makes up for fp16's other
// exponent bias.
template <int ExponentBits, int MantissaBits, bool Nan>
struct Halves {
  static constexpr int kBits = 1 + ExponentBits + MantissaBits;
  static constexpr i64 kBytes = kGroup * kBits / 8;
  static constexpr int32_t kShift = 16 - (1 << (ExponentBits - 1));
  static constexpr bool kEvenOdd = true;
  static constexpr int kUnused = 5 - ExponentBits;  // upper bits of fp16's exponent
  __m256i largest = _mm256_setzero_si256();

  explicit Halves(const LinearCall&) {}
  static __m256i to_half(__m256i code) {
    const int mantissa_and_exponent = (0x7FFF >> kUnused) & -(1 << (10 - MantissaBits));
    return _mm256_and_si256(_mm256_srai_epi16(code, kUnused), _mm256_set1_epi16(short(0x8000 | mantissa_and_exponent)));
  }
  template <class F>
  void decode(const u8* data, F f, Floats* out) {
    __m256i even, odd;
    split_pairs<kBits>(data, &even, &odd);
    from_halves(to_half(even), out);
    from_halves(to_half(odd), out + kVectors / 2);
    scale<kEvenOdd>(f, out);
    if (Nan) largest = _mm256_max_epu8(largest, _mm256_and_si256(load256(data), _mm256_set1_epi8(0x7F)));
  }
  // The NaN S.1111.111 of E4M3 would become a number.
  bool invalid() const { return Nan && _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7F))); }
};

struct Int8 {
  static constexpr i64 kBytes = kGroup;
  static constexpr int32_t kShift = -6;
  static constexpr bool kEvenOdd = false;
  explicit Int8(const LinearCall&) {}
  template <class F>
  void decode(const u8* data, F f, Floats* out) {
    for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512BW__)
      out[v] = Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(data + 16 * v))));
#else
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + 8 * v));
      out[v] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#endif
    }
    scale<kEvenOdd>(f, out);
  }
  bool invalid() const { return false; }
};

#endif

// Calls body(decoder) with a null pointer of the decoder's type, if codes of the format are integers of 8 bits times a
// power of two. `format`: the number that ../linear.py gives a format with blocks of whole groups; 0 for all others.
template <class Body>
void with_integer_decoder(int32_t format, Body body) {
  switch (format) {
    case 1: return body((Nibbles*)nullptr);
    case 5: return body((Halves<2, 3, false>*)nullptr);
    case 6: return body((Int8*)nullptr);
  }
}

// The same for every format.
template <class Body>
void with_decoder(int32_t format, Body body) {
  switch (format) {
#if defined(__AVX512BW__) || defined(__AVX2__)
    case 1:
    case 5:
    case 6: return with_integer_decoder(format, body);
    case 2: return body((Halves<4, 3, true>*)nullptr);
    case 3: return body((Halves<5, 2, false>*)nullptr);
    case 4: return body((Halves<3, 2, false>*)nullptr);
#endif
    default: return body((Decoded*)nullptr);
  }
}

// Of a scale with a significand: the unit of integers, and the scale.
inline TwoFactors factors_of(const LinearCall& c, i64 row, i64 block) {
  float scale;
  load_scales(*c.float_scale, c.scale, row * c.row_blocks + block, 1, 1, &scale);
  return {1 / c.float_scale->unit, applied(scale, *c.float_scale, c.tensor_scale)};
}

// Decodes row `row` of the weight to out: (k rounded up to whole groups), in the order of a decoder, padded with zeros.
NOINLINE void decode_row(const LinearCall& c, i64 row, bool even_odd, float* out) {
  const u8* data = c.data + row * c.row_bytes;
  const u8* scale = c.scale + row * c.row_blocks;
  const Packing packing{c.bits, c.codes_per_group, c.bytes_per_group};
  for (i64 first = 0; first < c.k; first += kGroup) {
    float values[kGroup] = {};
    const i64 last = std::min(first + kGroup, c.k);
    const u8* codes = data + first;
    u8 unpacked[kGroup];
    if (packing.codes > 1) {
      const i64 rows = (last - first + packing.codes - 1) / packing.codes * packing.codes;
      unpack(data + first / packing.codes * packing.bytes, 1, rows, 1, packing, unpacked);
      codes = unpacked;
    }
    for (i64 i = first; i < last;) {
      const TwoFactors f = c.float_scale ? factors_of(c, row, i / c.block) : factors_of(scale[i / c.block], 0);
      const i64 end = i / c.block == (last - 1) / c.block ? last : (i / c.block + 1) * c.block;
      for (; i < end; ++i) values[i - first] = c.table[codes[i - first]] * f.first * f.second;
    }
    for (i64 i = 0; i < kGroup; ++i) out[first + i] = values[index_in_group(even_odd, i)];
  }
}

}  // namespace
