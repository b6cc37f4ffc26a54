// Attention of a few queries by fp32 vectors, over codes of every format with every scale, and over floats.
// Codes are decoded in registers, four slots at a time.

#pragma once

#include "packed_attention.h"
#include "softmax.h"

namespace {

constexpr i64 kMaxRows = 32;  // queries of a head, as in ../attention.py
constexpr i64 kTile = 4;      // slots that share each load of a query and each load of a sum
constexpr i64 kMaxVectors = kMaxWidth / kGroup * kVectors;

// Decodes row `row` of the cache to vectors in the order of the decoder.
template <class Decoder>
inline void decode_row(const CacheRows& rows, Decoder& decoder, i64 row, Floats* out) {
  const LinearCall& c = rows.call;
  const u8 *codes = c.data + row * c.row_bytes, *scale = c.scale + row * c.row_blocks;
  const i64 groups = c.k / kGroup;
  HalfFactors halves[kMaxWidth / kGroup];
  if (c.float_scale) set_half_factors(c, row, 0, groups, 1, Decoder::kShift, halves);
  for (i64 g = 0; g < groups; ++g, codes += Decoder::kBytes, out += kVectors) {
    if (c.float_scale) decoder.decode(codes, halves[g], out);
    else decoder.decode(codes, factors_of(scale[rows.block_of[g]], Decoder::kShift), out);
  }
}

// The decoder of a cache of floats, which have no codes.
template <int32_t Dtype>
struct Dense {
  static constexpr bool kEvenOdd = false;
  explicit Dense(const LinearCall&) {}
  bool invalid() const { return false; }
};

template <int32_t Dtype>
inline void decode_row(const CacheRows& rows, Dense<Dtype>&, i64 row, Floats* out) {
  const u8* values = rows.call.data + row * rows.call.row_bytes;
  for (i64 v = 0; v < rows.call.k / kWidth; ++v) out[v] = widened(values, Dtype, v * kWidth);
}

// One head of the keys of one sequence, with up to kMaxRows of its queries.
template <class Decoder>
class HeadFp32 {
 public:
  HeadFp32(const PackedAttention& attention, i64 pair, i64 first, i64 rows)
      : a(attention), c(a.call), pair_(pair), first_(first), rows_(rows), decoder_(a.keys.call) {
    query_.resize(rows_ * c.width);
    scores_.resize(rows_ * stride());
    std::vector<float> row(c.width);
    for (i64 r = 0; r < rows_; ++r) {
      get_floats(c.query, (pair_ * a.rows + first_ + r) * c.width, c.width, c.dtype, row.data());
      float* out = query_.data() + r * c.width;
      for (i64 i = 0; i < c.width; ++i)
        out[i] = a.factor * row[i / kGroup * kGroup + index_in_group(Decoder::kEvenOdd, i % kGroup)];
    }
  }

  void run() {
    score();
    const i64 end = whole_vectors(end_);
    for (i64 r = 0; r < rows_; ++r) {
      float* scores = scores_.data() + r * stride();
      sums_[r] = softmax(scores, end, largest_score(scores, end));
    }
    add_values();
    if (decoder_.invalid()) c.invalid = 1;
  }

 private:
  static i64 whole_vectors(i64 slots) { return (slots + kWidth - 1) / kWidth * kWidth; }
  i64 stride() const { return whole_vectors(c.slots); }

  void score() {
    const i64 vectors = c.width / kGroup * kVectors;
    const u8* masks[kMaxRows];
    for (i64 r = 0; r < rows_; ++r) masks[r] = a.mask_of(pair_, first_ + r);
    Floats keys[kTile * kMaxVectors];
    std::fill(scores_.begin(), scores_.end(), -INFINITY);
    for (i64 first = 0; first < c.slots; first += kTile) {
      const i64 count = std::min(kTile, c.slots - first);
      u32 visible[kMaxRows], any = 0;
      for (i64 r = 0; r < rows_; ++r) any |= visible[r] = a.visible(masks[r], first, count);
      if (!any) continue;
      end_ = first + count;
      for (i64 t = 0; t < count; ++t) {
        if (any >> t & 1) decode_row(a.keys, decoder_, pair_ * c.slots + first + t, keys + t * vectors);
      }
      for (i64 r = 0; r < rows_; ++r) {
        const float* query = query_.data() + r * c.width;
        score_tile(keys, vectors, query, visible[r], scores_.data() + r * stride() + first);
      }
    }
  }

  // Scores the slots of a tile that a query sees.
  static void score_tile(const Floats* keys, i64 vectors, const float* query, u32 visible, float* scores) {
    if (visible == (1u << kTile) - 1) {
      Floats sums[kTile] = {};
      for (i64 v = 0; v < vectors; ++v) {
        const Floats q = load<Floats>(query + v * kWidth);
        for (i64 t = 0; t < kTile; ++t) sums[t] = fused(keys[t * vectors + v], q, sums[t]);
      }
      for (i64 t = 0; t < kTile; ++t) scores[t] = sum_of_lanes(sums[t]);
      return;
    }
    for (i64 t = 0; t < kTile; ++t) {
      if (!(visible >> t & 1)) continue;
      Floats sum{};
      for (i64 v = 0; v < vectors; ++v) sum = fused(keys[t * vectors + v], load<Floats>(query + v * kWidth), sum);
      scores[t] = sum_of_lanes(sum);
    }
  }

  void add_values() {
    const i64 vectors = c.value_width / kGroup * kVectors;
    Floats values[kTile * kMaxVectors];
    std::vector<float> sums(rows_ * c.value_width), row(c.value_width);
    for (i64 first = 0; first < end_; first += kTile) {
      for (i64 t = 0; t < std::min(kTile, c.slots - first); ++t) {
        bool is_used = false;
        for (i64 r = 0; r < rows_ && !is_used; ++r) is_used = scores_[r * stride() + first + t] != 0.0f;
        if (is_used) decode_row(a.values, decoder_, pair_ * c.slots + first + t, values + t * vectors);
      }
      for (i64 r = 0; r < rows_; ++r) {
        add_tile(values, vectors, scores_.data() + r * stride() + first, sums.data() + r * c.value_width);
      }
    }
    for (i64 r = 0; r < rows_; ++r) {
      for (i64 i = 0; i < c.value_width; ++i) {
        row[i / kGroup * kGroup + index_in_group(Decoder::kEvenOdd, i % kGroup)] = sums[r * c.value_width + i];
      }
      a.store_row(pair_, first_ + r, sums_[r], row.data());
    }
  }

  // Adds the values of a tile. It skips weights of 0, also those of the padding: a hidden value may be no number.
  static void add_tile(const Floats* values, i64 vectors, const float* weights, float* sums) {
    bool all = true;
    for (i64 t = 0; t < kTile; ++t) all &= weights[t] != 0.0f;
    if (all) {
      for (i64 v = 0; v < vectors; ++v) {
        Floats sum = load<Floats>(sums + v * kWidth);
        for (i64 t = 0; t < kTile; ++t) sum = fused(values[t * vectors + v], floats(weights[t]), sum);
        store(sums + v * kWidth, sum);
      }
      return;
    }
    for (i64 t = 0; t < kTile; ++t) {
      if (weights[t] == 0.0f) continue;
      for (i64 v = 0; v < vectors; ++v) {
        store(sums + v * kWidth, fused(values[t * vectors + v], floats(weights[t]), load<Floats>(sums + v * kWidth)));
      }
    }
  }

  const PackedAttention& a;
  AttentionCall& c;
  const i64 pair_, first_, rows_;
  i64 end_ = 0;  // of the slots that a query sees
  Decoder decoder_;
  std::vector<float> query_, scores_;
  float sums_[kMaxRows];
};

}  // namespace
