// Attention over a query and keys in bfloat16, or in fp32 whose values bfloat16 holds; built and called by
// ../bfloat16_products.py.
//
// Scores are sums in fp32 of exact products, on units for bfloat16. A task packs the keys of a head, and takes 32
// queries at a time, over up to 1024 keys that are known when the largest score is looked for (Milakov and Gimelshein,
// 2018).

#include <atomic>
#include <optional>

#include "in_registers.h"
#include "softmax.h"
#include "weighted_values.h"

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kLeastQueries = 128;  // that are worth packing the keys again

struct Attention {
  const DenseAttentionCall& call;
  i64 rows, down;  // queries of a task, a multiple of 32; tasks of a head
  std::optional<InRegisters> quantizer;
  std::atomic<bool> unserved{false};

  explicit Attention(const DenseAttentionCall& c) : call(c) {
    if (c.epilogue) quantizer.emplace(*c.epilogue->spec, c.epilogue->out_dtype);
    const i64 wanted = (2 * c.threads + c.batch * c.heads - 1) / (c.batch * c.heads);
    down = std::max<i64>(1, std::min(wanted, c.queries / kLeastQueries));
    rows = ((c.queries + down - 1) / down + kPair - 1) / kPair * kPair;
    down = (c.queries + rows - 1) / rows;
  }
};

// The queries of one head that a thread works on; T: float, or u16 of bfloat16.
template <class T>
class Head {
 public:
  explicit Head(const Attention& attention)
      : c(attention.call),
        quantizer_(attention.quantizer ? &*attention.quantizer : nullptr),
        groups_((c.width + kGroup - 1) / kGroup),
        across_((c.value_width + kPair - 1) / kPair * kPair),
        tiles_(c.units & AMX),
        values_(c, across_) {
    keys_.resize((c.keys + kPair - 1) / kPair * panel());
    query_.resize(kPair * groups_ * kGroup);
    scores_.resize(kPair * kScores);
    sums_.resize(kPair * across_);
    for (i64 r = 0; r < kPair; ++r) rows_[r] = query_.data() + r * groups_ * kGroup;
  }

  // Queries [top, bottom). Returns false where bfloat16 does not hold the values in fp32, or a product could be
  // subnormal.
  bool run(i64 batch, i64 head, i64 top, i64 bottom) {
    Seen of_query, of_keys;
    const i64 key_head = head / c.group, keys = c.causal ? std::min(bottom, c.keys) : c.keys;
    const Strided<T> key{at(c.key, c.key_stride, batch, key_head), 1, c.key_stride[2]};
    for (i64 first = 0; first < keys; first += kPair) {
      pack_panel(key, first, keys, c.width, keys_.data() + first / kPair * panel(), of_keys);
    }
    const T* query = at(c.query, c.query_stride, batch, head);
    values_.pack(at(c.value, c.value_stride, batch, key_head), c.value_stride[2], c.value_width, keys);
    for (i64 m = top; m < bottom; m += kPair) {
      const i64 n = std::min(kPair, bottom - m);
      pack_rows(query + m * c.query_stride[2], c.query_stride[2], n, c.width, query_.data(), of_query);
      std::fill(largest_, largest_ + kPair, -INFINITY);
      std::fill(whole_, whole_ + kPair, 0.0f);
      sums_.zero();
      const i64 last = c.causal ? std::min(m + n, keys) : keys;
      for (i64 first = 0; first < last; first += kStripKeys) {
        const i64 count = std::min(kStripKeys, last - first);
        score(n, first, count);
        for (i64 r = 0; r < n; ++r) weigh(batch, head, m, r, first, count);
        values_.add(scores_.data(), n, first, count, sums_.data());
      }
      for (i64 r = 0; r < n; ++r) put(r, ((batch * c.queries + m + r) * c.heads + head) * c.value_width);
    }
    return of_query.are_bfloats() && of_keys.are_bfloats() && is_served(of_query.exponent(), of_keys.exponent());
  }

 private:
  i64 panel() const { return groups_ * 2 * kTile; }
  static const T* at(const void* x, const int64_t* stride, i64 batch, i64 head) {
    return static_cast<const T*>(x) + batch * stride[0] + head * stride[1];
  }

  void score(i64 n, i64 first, i64 count) {
    for (i64 i = 0; i < count; i += kPair) {
      const u16* keys = keys_.data() + (first + i) / kPair * panel();
      float* scores = scores_.data() + i;
      if (tiles_) square_in_tiles(query_.data(), groups_ * kGroup, keys, groups_, scores, kScores);
      else square_in_vectors(rows_, n, keys, 1, groups_ * kGroup, scores, kScores);
    }
  }

  // The scores of a row to weights; what was summed before them is adapted to a larger score.
  void weigh(i64 batch, i64 head, i64 m, i64 r, i64 first, i64 count) {
    float* scores = scores_.data() + r * kScores;
    const i64 at = batch * c.mask_stride[0] + head * c.mask_stride[1] + (m + r) * c.mask_stride[2] + first;
    const i64 known = c.causal ? std::min(count, m + r + 1 - first) : count, end = (count + kSide - 1) / kSide * kSide;
    const T* added = static_cast<const T*>(c.added);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (i64 i = 0; i < end; i += kSide) {
      __mmask16 seen = lanes(i, known);
      __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(c.factor));
      if (added) x = _mm512_add_ps(x, known_values(added + at + i, seen));
      if (c.seen)
        seen &= _mm512_test_epi32_mask(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(seen, c.seen + at + i)),
                                       _mm512_set1_epi32(255));
      x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
      _mm512_storeu_ps(scores + i, x);
      most = _mm512_max_ps(x, most);
    }
    const float largest = std::max(largest_[r], _mm512_reduce_max_ps(most));
    const float before = largest_[r] == -INFINITY ? 0.0f : std::exp(largest_[r] - largest);
    if (before != 1.0f && first) {
      for (i64 i = 0; i < across_; ++i) sums_.data()[r * across_ + i] *= before;
    }
    whole_[r] = whole_[r] * before + softmax(scores, end, largest);
    largest_[r] = largest;
  }

  void put(i64 r, i64 at) const {
    constexpr int32_t dtype = sizeof(T) == 4 ? FP32 : BF16;
    for (i64 i = 0; i < c.value_width; i += kPair) {
      Floats y[2];
      for (i64 h = 0; h < 2; ++h) y[h] = result(r, i + h * kSide, dtype);
      if (quantizer_) {
        quantizer_->quantize(y, 2);
        store_two(c.out, c.epilogue->out_dtype, at + i, y[0], y[1]);
        continue;
      }
      T values[kPair];
      store_two(values, dtype, 0, y[0], y[1]);
      std::copy(values, values + std::min(kPair, c.value_width - i), static_cast<T*>(c.out) + at + i);
    }
  }

  Floats result(i64 r, i64 i, int32_t dtype) const {
    const Floats y = load<Floats>(sums_.data() + r * across_ + i) / floats(whole_[r] == 0.0f ? 1.0f : whole_[r]);
    return rounded(y == y ? y : Floats(ints(0x7FC00000)), dtype);
  }

  const DenseAttentionCall& c;
  const InRegisters* const quantizer_;  // or null
  const i64 groups_, across_;           // of the width; values of a row of sums
  const bool tiles_;
  WeightedValues<T> values_;
  Buffer<u16> keys_, query_;
  Buffer<float> scores_, sums_;
  const u16* rows_[kPair];
  float largest_[kPair], whole_[kPair];
};

template <class T>
void run_attention(i64 begin, i64 end, void* context) {
  Attention& attention = *static_cast<Attention*>(context);
  const DenseAttentionCall& c = attention.call;
  const KeepSubnormals keep;
  Head<T> head(attention);
  if (c.units & AMX) configure();
  for (i64 task = begin; task < end && !attention.unserved; ++task) {
    const i64 pair = task / attention.down, top = task % attention.down * attention.rows;
    if (!head.run(pair / c.heads, pair % c.heads, top, std::min(top + attention.rows, c.queries))) {
      attention.unserved = true;
    }
  }
  if (c.units & AMX) release();
}

}  // namespace

extern "C" {

int32_t pt2mx_dense_attention(const DenseAttentionCall* call, ParallelFor parallel_for) {
  const Epilogue* epilogue = call->epilogue;
  if (epilogue && !InRegisters::serves(*epilogue->spec, epilogue->block, call->value_width)) return kUnserved;
  Attention attention(*call);
  const i64 tasks = call->batch * call->heads * attention.down;
  const auto run = call->dtype == BF16 ? run_attention<u16> : run_attention<float>;
  const int32_t error = parallel_for(0, tasks, 1, run, &attention);
  return error ? error : attention.unserved ? kUnserved : 0;
}

}  // extern "C"

#else

extern "C" {
int32_t pt2mx_dense_attention(const DenseAttentionCall*, ParallelFor) { return kUnserved; }
}  // extern "C"

#endif
