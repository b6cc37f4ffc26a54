// The last step of attention: the sum of values, each times its weight, of 32 queries. In fp32 models the weights stay
// in fp32; in bfloat16 ones they are rounded to bfloat16, as torch's are, and units for it multiply.

#pragma once

#include "buffer.h"
#include "panels.h"

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kStripKeys = 1024;          // whose scores are kept
constexpr i64 kScores = kStripKeys + 16;  // from row to row: apart by a power of two they leave the first-level cache
constexpr i64 kSummed = 128;              // keys whose values are summed by themselves
constexpr i64 kTall = 8;                  // rows of weights that go together, with kPair columns of values

template <class T>
class WeightedValues;

template <>
class WeightedValues<float> {
 public:
  // across: values of a key, filled up to a multiple of kPair.
  WeightedValues(const DenseAttentionCall& c, i64 across) : across_(across) { values_.resize(c.keys * across); }

  // To (columns / kPair, keys, kPair): rows that lie apart by a power of two do not stay in the first-level cache.
  void pack(const float* values, i64 stride, i64 width, i64 keys) {
    keys_ = keys;
    float* out = values_.data();
    for (i64 i = 0; i < across_; i += kPair) {
      const __mmask16 first = lanes(i, width), second = lanes(i + kSide, width);
      for (i64 key = 0; key < keys; ++key, out += kPair) {
        const float* row = values + key * stride + i;
        _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(first, row));
        _mm512_storeu_ps(out + kSide, _mm512_maskz_loadu_ps(second, row + kSide));
      }
    }
  }

  // sums: (kPair, across) += weights: (n, count), kScores a row, of the keys from `first` on, times their values.
  void add(const float* weights, i64 n, i64 first, i64 count, float* sums) const {
    for (i64 r = 0; r < n; r += kTall) {
      for (i64 i = 0; i < across_; i += kPair) {
        add_rows(weights + r * kScores, values_.data() + i * keys_ + first * kPair, count, sums + r * across_ + i);
      }
    }
  }

 private:
  // kTall rows and kPair columns. Some keys are summed by themselves: sums of sums are more exact.
  NOINLINE void add_rows(const float* weights, const float* values, i64 keys, float* sums) const {
    for (i64 key = 0; key < keys;) {
      __m512 sum[kTall][2] = {};
      for (const i64 end = std::min(key + kSummed, keys); key < end; ++key, values += kPair) {
        const __m512 first = _mm512_loadu_ps(values), second = _mm512_loadu_ps(values + kSide);
        for (i64 r = 0; r < kTall; ++r) {
          const __m512 weight = _mm512_set1_ps(weights[r * kScores + key]);
          sum[r][0] = _mm512_fmadd_ps(weight, first, sum[r][0]);
          sum[r][1] = _mm512_fmadd_ps(weight, second, sum[r][1]);
        }
      }
      for (i64 r = 0; r < kTall; ++r) {
        for (i64 h = 0; h < 2; ++h) {
          float* total = sums + r * across_ + h * kSide;
          _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum[r][h]));
        }
      }
    }
  }

  const i64 across_;
  i64 keys_ = 0;
  Buffer<float> values_;
};

template <>
class WeightedValues<u16> {
 public:
  WeightedValues(const DenseAttentionCall& c, i64 across) : across_(across), tiles_(c.units & AMX) {
    values_.resize((c.keys + kGroup - 1) / kGroup * kGroup * across);
    weights_.resize(kPair * kStripKeys);
    sums_.resize(kSquare);
  }

  // To (columns / kPair, groups of keys, ..), as a panel of squares.h.
  void pack(const u16* values, i64 stride, i64 width, i64 keys) {
    Seen seen;  // of which bfloat16 tells nothing
    panel_ = (keys + kGroup - 1) / kGroup * 2 * kTile;
    for (i64 i = 0; i < across_; i += kPair) {
      pack_panel(Strided<u16>{values, stride, 1}, i, width, keys, values_.data() + i / kPair * panel_, seen);
    }
  }

  void add(const float* weights, i64 n, i64 first, i64 count, float* sums) {
    const i64 groups = (count + kGroup - 1) / kGroup, stride = groups * kGroup;
    const u16* rows[kPair];
    for (i64 r = 0; r < kPair; ++r) {
      rows[r] = weights_.data() + r * stride;
      if (r < n) narrow_weights(weights + r * kScores, count, weights_.data() + r * stride);
    }
    for (i64 i = 0; i < across_; i += kPair) {
      const u16* panel = values_.data() + i / kPair * panel_ + first / kGroup * 2 * kTile;
      if (tiles_) square_in_tiles(weights_.data(), stride, panel, groups, sums_.data(), kPair);
      else square_in_vectors(rows, n, panel, 1, groups * kGroup, sums_.data(), kPair);
      for (i64 r = 0; r < n; ++r) {
        float* total = sums + r * across_ + i;
        for (i64 j = 0; j < kPair; ++j) total[j] += sums_.data()[r * kPair + j];
      }
    }
  }

 private:
  // Filled with zeros up to a whole group.
  __attribute__((target("avx512bf16"))) static void narrow_weights(const float* weights, i64 count, u16* out) {
    for (i64 i = 0; i < count; i += kGroup) {
      const __m512 first = _mm512_maskz_loadu_ps(lanes(i, count), weights + i);
      const __m512 second = _mm512_maskz_loadu_ps(lanes(i + kSide, count), weights + i + kSide);
      _mm512_storeu_si512(out + i, __m512i(_mm512_cvtne2ps_pbh(second, first)));
    }
  }

  const i64 across_;
  const bool tiles_;
  i64 panel_ = 0;  // values of one
  Buffer<u16> values_, weights_;
  Buffer<float> sums_;
};

}  // namespace

#endif
