// linear_mx of up to 32 rows of x in fp32 vectors: the codes of a few rows of the weight are decoded in registers, a
// group of each, and multiplied with some rows of x. This kernel supports every format, scale and dtype.

#pragma once

#include <type_traits>

#include "linear.h"

namespace {

// True if the bits of one of the floats are of a value below 2**-100 other than zero. `mantissa`: bits of their
// mantissa.
template <class Bits>
bool has_tiny(const Bits* x, i64 n, int mantissa) {
  const Bits sign = Bits(1) << (8 * sizeof(Bits) - 1), limit = Bits(Bits(kBias - 100) << mantissa);
  Bits tiny = 0;
#pragma omp simd reduction(| : tiny)
  for (i64 i = 0; i < n; ++i) {
    const Bits magnitude = x[i] & Bits(~sign);
    tiny |= Bits(magnitude && magnitude < limit);
  }
  return tiny;
}

constexpr i64 kStrip = 32;  // groups of a partial sum: a sum of partial sums is more exact

// sums += `groups` groups of the weight's rows `data` times `R` rows of x. Prefetches the codes `ahead` bytes further,
// of the rows that follow.
template <class Decoder, int R, class F>
NOINLINE void multiply(Decoder& decoder, const u8* const* data, i64 ahead, const F* const* factors, const float* x,
                       i64 stride, i64 groups, Floats (*sums)[R]) {
  for (i64 begin = 0; begin < groups; begin += kStrip) {
    Floats sum[kRows][R] = {};
    const i64 end = std::min(begin + kStrip, groups);
    for (i64 g = begin; g < end; ++g, x += kGroup) {
      Floats w[kRows][kVectors];
      for (int q = 0; q < kRows; ++q) {
        const u8* codes = data[q] + g * Decoder::kBytes;
        decoder.decode(codes, factors[q][g], w[q]);
        __builtin_prefetch(codes + ahead);
      }
      for (int v = 0; v < kVectors; ++v) {
        for (int r = 0; r < R; ++r) {
          const Floats values = load<Floats>(x + r * stride + v * kWidth);
          for (int q = 0; q < kRows; ++q) sum[q][r] = fused(w[q][v], values, sum[q][r]);
        }
      }
    }
    for (int q = 0; q < kRows; ++q) {
      for (int r = 0; r < R; ++r) sums[q][r] += sum[q][r];
    }
  }
}

// kRows rows of the weight from `row` on.
template <class Decoder>
class Rows {
  static constexpr bool kIsDecoded = std::is_same<Decoder, Decoded>::value;  // a decoded row needs no factors

 public:
  // decoded: their values, from decode_row, or null
  Rows(const Linear& linear, i64 row, const float* decoded) : linear_(linear), row_(row), decoder_(linear.call) {
    const LinearCall& c = linear.call;
    whole_ = decoded ? linear.groups : c.k / kGroup;
    per_block_ = decoded ? linear.groups : c.block / kGroup;
    ahead_ = decoded ? 0 : kRows * c.row_bytes;
    for (int q = 0; q < kRows; ++q) {
      const i64 at = std::min(row + q, c.n - 1);
      data_[q] =
          decoded ? reinterpret_cast<const u8*>(decoded + q * linear.groups * kGroup) : c.data + at * c.row_bytes;
      scale_[q] = c.scale + at * c.row_blocks;
      if (whole_ < linear.groups) last_group<Decoder>(c, at, padded_[q]);
    }
  }

  // Multiplies them with all of x, `R` rows at a time. Returns true if a code has to be looked up.
  template <int R>
  bool times_x() {
    const LinearCall& c = linear_.call;
    const i64 stride = linear_.groups * kGroup, rows = std::min<i64>(kRows, c.n - row_);
    for (i64 m = 0; m < c.m; m += R) {
      Floats sums[kRows][R] = {};
      add<R>(linear_.x.data() + m * stride, stride, sums);
      if (decoder_.invalid()) return true;
      for (i64 r = 0; r < std::min<i64>(R, c.m - m); ++r) {
        float y[kRows];
        for (i64 q = 0; q < rows; ++q) y[q] = sum_of_lanes(sums[q][r]);
        finish(linear_, m + r, row_, rows, y);
      }
    }
    return false;
  }

 private:
  template <int R>
  void add(const float* x, i64 stride, Floats (*sums)[R]) {
    const LinearCall& c = linear_.call;
    for (i64 g = 0; g < linear_.groups; g += kChunk) {
      const i64 end = std::min(g + kChunk, linear_.groups), full = std::min(end, whole_);
      const u8* data[kRows];
      for (int q = 0; q < kRows; ++q) data[q] = data_[q] + g * Decoder::kBytes;
      const auto multiply_groups = [&](const auto** factors) {
        multiply<Decoder, R>(decoder_, data, ahead_, factors, x + g * kGroup, stride, full - g, sums);
        if (full == end) return;
        for (int q = 0; q < kRows; ++q) {
          data[q] = padded_[q];
          factors[q] += full - g;
        }
        multiply<Decoder, R>(decoder_, data, 0, factors, x + full * kGroup, stride, 1, sums);
      };
      if (c.float_scale && !kIsDecoded) {
        HalfFactors halves[kRows][kChunk];
        const HalfFactors* factors[kRows];
        for (int q = 0; q < kRows; ++q) {
          const i64 at = std::min(row_ + q, c.n - 1);
          set_half_factors(c, at, g, end, linear_.result_factor, Decoder::kShift, halves[q]);
          factors[q] = halves[q];
        }
        multiply_groups(factors);
        continue;
      }
      Scales scales[kRows];
      const float* one[kRows];
      const TwoFactors* two[kRows];
      bool ordinary = true;
      for (int q = 0; q < kRows; ++q) {
        scales[q].set(scale_[q], per_block_, g, end, Decoder::kShift);
        ordinary &= scales[q].ordinary;
        one[q] = scales[q].one;
        two[q] = scales[q].two;
      }
      if (ordinary) {
        multiply_groups(one);
        continue;
      }
      for (int q = 0; q < kRows; ++q) scales[q].split(scale_[q], per_block_, g, end, Decoder::kShift);
      multiply_groups(two);
    }
  }

  const Linear& linear_;
  const i64 row_;
  Decoder decoder_;
  i64 whole_, per_block_, ahead_;
  const u8 *data_[kRows], *scale_[kRows];
  u8 padded_[kRows][Decoder::kBytes];  // the last group, padded with zeros
};

template <class Decoder, int R>
void run(i64 begin, i64 end, void* context) {
  const Linear& linear = *static_cast<const Linear*>(context);
  const KeepSubnormals keep;
  Buffer<float> decoded;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 row = tile * kRows;
    if (!std::is_same<Decoder, Decoded>::value && !Rows<Decoder>(linear, row, nullptr).template times_x<R>()) {
      continue;
    }
    const i64 stride = linear.groups * kGroup;
    decoded.resize(kRows * stride);
    for (i64 q = 0; q < kRows; ++q) {
      decode_row(linear.call, std::min(row + q, linear.call.n - 1), Decoder::kEvenOdd, decoded.data() + q * stride);
    }
    Rows<Decoded>(linear, row, decoded.data()).template times_x<R>();
  }
}

}  // namespace
