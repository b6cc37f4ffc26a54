// The second matmul of attention, P times V: 32 queries' softmax weights times the values. In fp32 models the weights
// stay in fp32 and vectors multiply; in bfloat16 models the weights are rounded to bfloat16, as torch's are, and the
// micro-kernels multiply.

#pragma once

#include "pack_b.h"
#include "buffer.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kStripKeys = 1024;          // keys whose scores are kept
constexpr i64 kScores = kStripKeys + 16;  // stride of rows: a power of two would evict them from the first-level cache
constexpr i64 kSummed = 128;              // keys of a partial sum
constexpr i64 kPvRows = 8;                // rows of weights that are multiplied with kNR columns of values together

template <class T>
class AttentionPV;

template <>
class AttentionPV<float> {
 public:
  // across: values of a key, rounded up to a multiple of kNR.
  AttentionPV(const DenseAttentionCall& c, i64 across) : across_(across) { values_.resize(c.keys * across); }

  // Packs values to (columns / kNR, keys, kNR): a stride that is a power of two would evict rows from the first-level
  // cache.
  void pack(const float* values, i64 stride, i64 width, i64 keys) {
    keys_ = keys;
    float* out = values_.data();
    for (i64 i = 0; i < across_; i += kNR) {
      const __mmask16 first = lanes(i, width), second = lanes(i + kTileRows, width);
      for (i64 key = 0; key < keys; ++key, out += kNR) {
        const float* row = values + key * stride + i;
        _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(first, row));
        _mm512_storeu_ps(out + kTileRows, _mm512_maskz_loadu_ps(second, row + kTileRows));
      }
    }
  }

  // sums: (kMR, across) += weights: (n, count), rows kScores apart, of the keys from `first` on, times their values.
  void add(const float* weights, i64 n, i64 first, i64 count, float* sums) const {
    for (i64 r = 0; r < n; r += kPvRows) {
      for (i64 i = 0; i < across_; i += kNR) {
        add_rows(weights + r * kScores, values_.data() + i * keys_ + first * kNR, count, sums + r * across_ + i);
      }
    }
  }

 private:
  // Adds kPvRows rows of kNR columns. It sums a few keys at a time, because a sum of partial sums is more exact.
  NOINLINE void add_rows(const float* weights, const float* values, i64 keys, float* sums) const {
    for (i64 key = 0; key < keys;) {
      __m512 sum[kPvRows][2] = {};
      for (const i64 end = std::min(key + kSummed, keys); key < end; ++key, values += kNR) {
        const __m512 first = _mm512_loadu_ps(values), second = _mm512_loadu_ps(values + kTileRows);
        for (i64 r = 0; r < kPvRows; ++r) {
          const __m512 weight = _mm512_set1_ps(weights[r * kScores + key]);
          sum[r][0] = _mm512_fmadd_ps(weight, first, sum[r][0]);
          sum[r][1] = _mm512_fmadd_ps(weight, second, sum[r][1]);
        }
      }
      for (i64 r = 0; r < kPvRows; ++r) {
        for (i64 h = 0; h < 2; ++h) {
          float* total = sums + r * across_ + h * kTileRows;
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
class AttentionPV<u16> {
 public:
  AttentionPV(const DenseAttentionCall& c, i64 across) : across_(across), amx_(c.isa & AMX) {
    values_.resize((c.keys + kGroup - 1) / kGroup * kGroup * across);
    weights_.resize(kMR * kStripKeys);
    sums_.resize(kMicroTile);
  }

  // Packs values to (columns / kNR, groups of keys, ..), as panels of B.
  void pack(const u16* values, i64 stride, i64 width, i64 keys) {
    ValueStats unused;  // bfloat16 needs no check
    panel_ = (keys + kGroup - 1) / kGroup * 2 * kTileElems;
    for (i64 i = 0; i < across_; i += kNR) {
      pack_panel(Strided<u16>{values, stride, 1}, i, width, keys, values_.data() + i / kNR * panel_, unused);
    }
  }

  void add(const float* weights, i64 n, i64 first, i64 count, float* sums) {
    const i64 groups = (count + kGroup - 1) / kGroup;
    const StridesOfA strides(amx_, groups);
    const u16* rows[kMR];
    for (i64 r = 0; r < kMR; ++r) {
      u16* const row = weights_.data() + r * strides.row;
      rows[r] = row;
      if (r < n) narrow_weights(weights + r * kScores, count, row, strides.group);
    }
    for (i64 i = 0; i < across_; i += kNR) {
      const u16* panel = values_.data() + i / kNR * panel_ + first / kGroup * 2 * kTileElems;
      if (amx_) microkernel_32x32_amx(weights_.data(), panel, groups, sums_.data(), kNR);
      else microkernel_32x32_avx512(rows, n, panel, 1, groups * kGroup, sums_.data(), kNR);
      for (i64 r = 0; r < n; ++r) {
        float* total = sums + r * across_ + i;
        for (i64 j = 0; j < kNR; ++j) total[j] += sums_.data()[r * kNR + j];
      }
    }
  }

 private:
  // Rounds `count` weights to bfloat16, padded with zeros to a whole group; groups are `stride` values apart.
  __attribute__((target("avx512bf16"))) static void narrow_weights(const float* weights, i64 count, u16* out,
                                                                   i64 stride) {
    for (i64 i = 0; i < count; i += kGroup, out += stride) {
      const __m512 first = _mm512_maskz_loadu_ps(lanes(i, count), weights + i);
      const __m512 second = _mm512_maskz_loadu_ps(lanes(i + kTileRows, count), weights + i + kTileRows);
      _mm512_storeu_si512(out, __m512i(_mm512_cvtne2ps_pbh(second, first)));
    }
  }

  const i64 across_;
  const bool amx_;
  i64 panel_ = 0;  // size of a panel
  Buffer<u16> values_, weights_;
  Buffer<float> sums_;
};

}  // namespace

#endif
