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
    Floats key[kMaxWidth / kGroup * kVectors];
    std::fill(scores_.begin(), scores_.end(), -INFINITY);
    for (i64 slot = 0; slot < c.slots; ++slot) {
      bool decoded = false;
      for (i64 r = 0; r < rows_; ++r) {
        if (c.mask && !mask_row[r][slot * c.mask_slot]) continue;
        if (!decoded) {
          const i64 row = pair_ * c.slots + slot;
          decode_groups(decoder_, c.key + row * c.key_bytes, c.key_scale + row * c.key_blocks, groups, per_block, key);
          decoded = true;
        }
        Floats sum{};
        const float* query = query_.data() + r * c.width;
        for (i64 v = 0; v < vectors; ++v) sum = fma(key[v], load<Floats>(query + v * kWidth), sum);
        scores_[r * stride() + slot] = sum_of_lanes(sum);
      }
    }
  }

  void add_values() {
    const i64 groups = c.value_width / kGroup, vectors = groups * kVectors;
    Floats value[kMaxWidth / kGroup * kVectors];
    std::vector<float> sums(rows_ * c.value_width), row(c.value_width);
    for (i64 slot = 0; slot < c.slots; ++slot) {
      bool decoded = false;
      for (i64 r = 0; r < rows_; ++r) {
        const float weight = scores_[r * stride() + slot];
        if (weight == 0.0f) continue;
        if (!decoded) {
          const i64 at = pair_ * c.slots + slot;
          const u8 *codes = c.value + at * c.value_bytes, *scale = c.value_scale + at * c.value_blocks;
          decode_groups(decoder_, codes, scale, groups, std::max<i64>(c.value_block / kGroup, 1), value);
          decoded = true;
        }
        float* sum = sums.data() + r * c.value_width;
        for (i64 v = 0; v < vectors; ++v) {
          store(sum + v * kWidth, fma(value[v], floats(weight), load<Floats>(sum + v * kWidth)));
        }
      }
    }
    for (i64 r = 0; r < rows_; ++r) store_row(r, sums.data() + r * c.value_width, row.data());
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
