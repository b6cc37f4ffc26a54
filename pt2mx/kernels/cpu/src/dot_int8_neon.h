// SDOT of AArch64's FEAT_DotProd for dot_int8.h: what its loop does to a vector of kWidth sums, four codes each; and
// the weight's codes, which are signed here.

#pragma once

#include <type_traits>

#include "int8_codes.h"

#if defined(__aarch64__)
#define PT2MX_HAVE_DOT_INT8

#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

using Bytes = uint8x16_t;

struct Nibbles {
  static constexpr i64 kBytes = kGroup / 2;
};
template <>
struct Halves<2, 3, false> {
  static constexpr i64 kBytes = kGroup * 6 / 8;
};
struct Int8 {
  static constexpr i64 kBytes = kGroup;
};

template <>
struct IntegerColumns<Nibbles> : IntegerTable {
  static constexpr int kRowVectors = 2;
  Bytes table;

  explicit IntegerColumns(const float* values) : IntegerTable(values, 16, true) {
    u8 codes[16];
    get_codes(values, codes);
    table = load<Bytes>(codes);
  }
  // The lower and the upper nibbles.
  template <int>
  void decode_row(const u8* data, Bytes* out) const {
    const Bytes pairs = load<Bytes>(data);
    out[0] = vqtbl1q_u8(table, pairs & 15);
    out[1] = vqtbl1q_u8(table, pairs >> 4);
  }
};

template <>
struct IntegerColumns<Halves<2, 3, false>> : IntegerTable {
  static constexpr int kRowVectors = 1;
  uint8x16x4_t table;

  explicit IntegerColumns(const float* values) : IntegerTable(values, 64, true) {
    u8 codes[64];
    get_codes(values, codes);
    table = load<uint8x16x4_t>(codes);
  }
  // Spreads 12 bytes, and shifts four codes of three bytes to a byte each: b1 b0 has the lower two, b2 b1 the upper
  // two.
  template <int>
  void decode_row(const u8* data, Bytes* out) const {
    const Bytes order = {0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11};
    const uint16x8_t words = vreinterpretq_u16_u8(vqtbl1q_u8(load<Bytes>(data), order));
    const int16x8_t to_low = {0, -4, 0, -4, 0, -4, 0, -4};
    const uint16x8_t even = vshlq_u16(words, to_low) & 0x3F, odd = vshlq_u16(words, to_low + 2) & 0x3F00;
    *out = vqtbl4q_u8(table, vreinterpretq_u8_u16(even | odd));
  }
};

template <>
struct IntegerColumns<Int8> {
  static constexpr int kRowVectors = 1;
  static constexpr int32_t shift = kCodeMantissa, offset = 0;
  explicit IntegerColumns(const float*) {}
  template <int>
  void decode_row(const u8* data, Bytes* out) const {
    *out = load<Bytes>(data);
  }
};

inline bool has_dotprod() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return false;
#endif
}

// Bits of IntegerIsa that a weight with these values can use.
template <class Decoder>
int32_t integer_isa_for(const float* table) {
  return IntegerColumns<Decoder>(table).shift < 8 && has_dotprod() ? SDOT : 0;
}

constexpr int32_t kLeastIsa = SDOT;

// Calls body(isa) with the instruction as a constant.
template <class Body>
auto with_dot_isa(int32_t, Body body) {
  return body(std::integral_constant<int, SDOT>());
}

inline Bytes each_byte(u8 byte) { return vdupq_n_u8(byte); }
inline Floats to_floats(Bytes sums) { return __builtin_convertvector(Ints(sums), Floats); }

// Writes the codes of a group at even and at odd positions.
inline void split_even_odd(const u8* codes, u8* even, u8* odd) {
  const uint8x16x2_t both = vld2q_u8(codes);
  store(even, both.val[0]);
  store(odd, both.val[1]);
}

// sum: plus the products of codes of the weight, as many vectors as x has, 4 * kLanes codes apart. In assembly, because
// a compiler has the instruction only for processors that have it.
template <class Columns, int kIsa>
inline __attribute__((always_inline)) Bytes dot(Bytes sum, const Bytes* w, const u8* x) {
  for (int v = 0; v < Columns::kRowVectors; ++v) {
    const Bytes values = load<Bytes>(x + v * 4 * kLanes);
    asm(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(w[v]), "w"(values));
  }
  return sum;
}

// Reads the scale of a vector's sums, which belong to one group.
template <i64 kGroupLanes>
struct LaneScales {
  static_assert(kGroupLanes % kWidth == 0, "a vector has sums of one group");
  Ints powers(const u8* scale) const { return ints(*scale << 23); }
};

// Writes the sums of the lanes of kDotTile rows, `stride` vectors apart.
inline void sum_lanes(const Floats* totals, i64 stride, float* y) {
  for (int q = 0; q < kDotTile; ++q, totals += stride) {
    y[q] = sum_of_lanes((totals[0] + totals[2]) + (totals[1] + totals[3]));
  }
}

}  // namespace

#endif
