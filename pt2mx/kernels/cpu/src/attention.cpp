// attention_mx: a few queries over packed keys and values, whose codes are decoded in registers; built and called by
// ../attention.py.
//
// A head of the keys has a group of query heads. The kernel keeps their scores for all slots, so that it knows a slot's
// softmax weight when it decodes the slot's value. Each sum is computed by one thread in one order.

#include <type_traits>
#include <vector>

#include "decode.h"
#include "softmax.h"

namespace {

constexpr i64 kMaxWidth = 512, kMaxRows = 32;  // as in ../attention.py
constexpr i64 kTile = 4;                       // slots that share each load of a query and each load of a sum
constexpr i64 kMaxVectors = kMaxWidth / kGroup * kVectors;

// Decodes a row of `groups` whole groups to vectors in the order of the decoder; `per_block` groups share a scale.
template <class Decoder>
inline void decode_groups(Decoder& decoder, const u8* codes, const u8* scale, i64 groups, i64 per_block, Floats* out) {
  for (i64 g = 0; g < groups; ++g) {
    decoder.decode(codes + g * Decoder::kBytes, factors_of(scale[g / per_block], Decoder::kShift), out + g * kVectors);
  }
}

// One head of the keys of one sequence, with its queries.
template <class Decoder>
class Head {
 public:
  Head(const AttentionCall& call, i64 pair)
      : c(call), pair_(pair), rows_(call.group * call.queries), decoder_(decoder_call(call)) {
    query_.resize(rows_ * c.width);
    scores_.resize(rows_ * stride());
    std::vector<float> row(c.width);
    for (i64 r = 0; r < rows_; ++r) {
      get_floats(c.query, (pair_ * rows_ + r) * c.width, c.width, c.dtype, row.data());
      float* out = query_.data() + r * c.width;
      for (i64 i = 0; i < c.width; ++i)
        out[i] = c.factor * row[i / kGroup * kGroup + index_in_group(Decoder::kEvenOdd, i % kGroup)];
    }
  }

  void run() {
    score();
    for (i64 r = 0; r < rows_; ++r) {
      float* scores = scores_.data() + r * stride();
      sums_[r] = softmax(scores, stride(), largest_score(scores, stride()));
    }
    add_values();
    if (decoder_.invalid()) *c.invalid = 1;
  }

 private:
  static LinearCall decoder_call(const AttentionCall& c) {
    LinearCall call{};
    call.table = c.table;
    return call;
  }

  i64 stride() const { return (c.slots + kWidth - 1) / kWidth * kWidth; }

  void score() {
    const i64 groups = c.width / kGroup, vectors = groups * kVectors, per_block = std::max<i64>(c.block / kGroup, 1);
    const u8* mask_row[kMaxRows];
    for (i64 r = 0; r < rows_; ++r) {
      const i64 head = pair_ % c.heads * c.group + r / c.queries;
      mask_row[r] = c.mask + pair_ / c.heads * c.mask_batch + head * c.mask_head + r % c.queries * c.mask_query;
    }
    Floats keys[kTile * kMaxVectors];
    std::fill(scores_.begin(), scores_.end(), -INFINITY);
    for (i64 first = 0; first < c.slots; first += kTile) {
      const i64 count = std::min(kTile, c.slots - first);
      u32 visible[kMaxRows], any = 0;
      for (i64 r = 0; r < rows_; ++r)
        any |= visible[r] = c.mask ? visible_slots(mask_row[r], first, count) : (1u << count) - 1;
      for (i64 t = 0; t < count; ++t) {
        if (!(any >> t & 1)) continue;
        const i64 row = pair_ * c.slots + first + t;
        const u8 *codes = c.key + row * c.key_bytes, *scale = c.key_scale + row * c.key_blocks;
        decode_groups(decoder_, codes, scale, groups, per_block, keys + t * vectors);
      }
      for (i64 r = 0; r < rows_; ++r) {
        const float* query = query_.data() + r * c.width;
        score_tile(keys, vectors, query, visible[r], scores_.data() + r * stride() + first);
      }
    }
  }

  u32 visible_slots(const u8* mask_row, i64 first, i64 count) const {
    u32 visible = 0;
    for (i64 t = 0; t < count; ++t) visible |= u32(mask_row[(first + t) * c.mask_slot] != 0) << t;
    return visible;
  }

  // Scores the slots of a tile that a query sees.
  static void score_tile(const Floats* keys, i64 vectors, const float* query, u32 visible, float* scores) {
    if (visible == (1u << kTile) - 1) {
      Floats sums[kTile] = {};
      for (i64 v = 0; v < vectors; ++v) {
        const Floats q = load<Floats>(query + v * kWidth);
        for (i64 t = 0; t < kTile; ++t) sums[t] = fma(keys[t * vectors + v], q, sums[t]);
      }
      for (i64 t = 0; t < kTile; ++t) scores[t] = sum_of_lanes(sums[t]);
      return;
    }
    for (i64 t = 0; t < kTile; ++t) {
      if (!(visible >> t & 1)) continue;
      Floats sum{};
      for (i64 v = 0; v < vectors; ++v) sum = fma(keys[t * vectors + v], load<Floats>(query + v * kWidth), sum);
      scores[t] = sum_of_lanes(sum);
    }
  }

  void add_values() {
    const i64 groups = c.value_width / kGroup, vectors = groups * kVectors;
    const i64 per_block = std::max<i64>(c.value_block / kGroup, 1);
    Floats values[kTile * kMaxVectors];
    std::vector<float> sums(rows_ * c.value_width), row(c.value_width);
    for (i64 first = 0; first < c.slots; first += kTile) {
      for (i64 t = 0; t < std::min(kTile, c.slots - first); ++t) {
        bool is_used = false;
        for (i64 r = 0; r < rows_ && !is_used; ++r) is_used = scores_[r * stride() + first + t] != 0.0f;
        if (!is_used) continue;
        const i64 at = pair_ * c.slots + first + t;
        const u8 *codes = c.value + at * c.value_bytes, *scale = c.value_scale + at * c.value_blocks;
        decode_groups(decoder_, codes, scale, groups, per_block, values + t * vectors);
      }
      for (i64 r = 0; r < rows_; ++r) {
        add_tile(values, vectors, scores_.data() + r * stride() + first, sums.data() + r * c.value_width);
      }
    }
    for (i64 r = 0; r < rows_; ++r) store_row(r, sums.data() + r * c.value_width, row.data());
  }

  // Adds the values of a tile. It skips weights of 0, also those of the padding: a hidden value may be no number.
  static void add_tile(const Floats* values, i64 vectors, const float* weights, float* sums) {
    bool all = true;
    for (i64 t = 0; t < kTile; ++t) all &= weights[t] != 0.0f;
    if (all) {
      for (i64 v = 0; v < vectors; ++v) {
        Floats sum = load<Floats>(sums + v * kWidth);
        for (i64 t = 0; t < kTile; ++t) sum = fma(values[t * vectors + v], floats(weights[t]), sum);
        store(sums + v * kWidth, sum);
      }
      return;
    }
    for (i64 t = 0; t < kTile; ++t) {
      if (weights[t] == 0.0f) continue;
      for (i64 v = 0; v < vectors; ++v) {
        store(sums + v * kWidth, fma(values[t * vectors + v], floats(weights[t]), load<Floats>(sums + v * kWidth)));
      }
    }
  }

  void store_row(i64 r, const float* sums, float* row) {
    const float l_i = sums_[r] == 0.0f ? 1.0f : sums_[r];
    for (i64 i = 0; i < c.value_width; ++i) {
      const float y = sums[i] / l_i;
      row[i / kGroup * kGroup + index_in_group(Decoder::kEvenOdd, i % kGroup)] = y == y ? y : from_bits(0x7FC00000);
    }
    const i64 at = (pair_ * rows_ + r) * c.value_width;
    if (c.dtype == FP32) std::memcpy(static_cast<float*>(c.out) + at, row, 4 * c.value_width);
    else narrow(row, c.value_width, c.dtype, static_cast<u16*>(c.out) + at);
  }

  const AttentionCall& c;
  const i64 pair_, rows_;
  Decoder decoder_;
  std::vector<float> query_, scores_;
  float sums_[kMaxRows];
};

template <class Decoder>
void run(i64 begin, i64 end, void* context) {
  const KeepSubnormals keep;
  for (i64 pair = begin; pair < end; ++pair) Head<Decoder>(*static_cast<const AttentionCall*>(context), pair).run();
}

}  // namespace

extern "C" {

int32_t pt2mx_attention(AttentionCall* call, ParallelFor parallel_for) {
  int32_t error = 0;
  with_decoder(call->format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    // A processor without a decoder in registers uses the definition.
    if constexpr (std::is_same_v<Decoder, Decoded>) *call->invalid = 1;
    else error = parallel_for(0, call->pairs, 1, run<Decoder>, call);
  });
  return error;
}

}  // extern "C"
