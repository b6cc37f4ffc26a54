// Attention over a query and keys in bfloat16, or in fp32 with values that bfloat16 represents; built and called by
// ../bf16_matmul.py.
//
// Scores are sums in fp32 of exact products, on AMX or AVX512_BF16. A task packs the keys of a head, and takes 32
// queries at a time. Softmax is online (Milakov and Gimelshein, 2018): a task keeps up to 1024 scores of a query, the
// largest score so far (m_i), and the sum of softmax weights so far (l_i).

#include <atomic>
#include <optional>

#include "attention_pv.h"
#include "quantize_vec.h"
#include "softmax.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kMinQueries = 128;  // fewest queries for which a task packs the keys again

struct Attention {
  const DenseAttentionCall& call;
  i64 rows, down;  // queries of a task, a multiple of 32; tasks of a head
  std::optional<VecQuantizer> quantizer;
  std::atomic<bool> unsupported{false};

  explicit Attention(const DenseAttentionCall& c) : call(c) {
    if (c.epilogue) quantizer.emplace(*c.epilogue->spec, c.epilogue->out_dtype);
    const i64 splits = (2 * c.threads + c.batch * c.heads - 1) / (c.batch * c.heads);
    down = std::max<i64>(1, std::min(splits, c.queries / kMinQueries));
    rows = ((c.queries + down - 1) / down + kMR - 1) / kMR * kMR;
    down = (c.queries + rows - 1) / rows;
  }
};

// One head with up to 32 queries at a time; T: float, or u16 for bfloat16.
template <class T>
class Head {
 public:
  explicit Head(const Attention& attention)
      : c(attention.call),
        quantizer_(attention.quantizer ? &*attention.quantizer : nullptr),
        groups_((c.width + kGroup - 1) / kGroup),
        across_((c.value_width + kNR - 1) / kNR * kNR),
        amx_(c.isa & AMX),
        values_(c, across_) {
    keys_.resize((c.keys + kNR - 1) / kNR * panel());
    query_.resize(kMR * groups_ * kGroup);
    scores_.resize(kMR * kScores);
    sums_.resize(kMR * across_);
    for (i64 r = 0; r < kMR; ++r) rows_[r] = query_.data() + r * groups_ * kGroup;
  }

  // Computes queries [top, bottom). Returns false if bfloat16 does not represent the values in fp32, or a product could
  // be subnormal.
  bool run(i64 batch, i64 head, i64 top, i64 bottom) {
    ValueStats query_stats, key_stats;
    const i64 key_head = head / c.group, keys = c.causal ? std::min(bottom, c.keys) : c.keys;
    const Strided<T> key{at(c.key, c.key_stride, batch, key_head), 1, c.key_stride[2]};
    for (i64 first = 0; first < keys; first += kNR) {
      pack_panel(key, first, keys, c.width, keys_.data() + first / kNR * panel(), key_stats);
    }
    const T* query = at(c.query, c.query_stride, batch, head);
    values_.pack(at(c.value, c.value_stride, batch, key_head), c.value_stride[2], c.value_width, keys);
    for (i64 m = top; m < bottom; m += kMR) {
      const i64 n = std::min(kMR, bottom - m);
      pack_rows(query + m * c.query_stride[2], c.query_stride[2], n, c.width, StridesOfA(amx_, groups_), query_.data(),
                query_stats);
      std::fill(m_i_, m_i_ + kMR, -INFINITY);
      std::fill(l_i_, l_i_ + kMR, 0.0f);
      sums_.zero();
      const i64 last = c.causal ? std::min(m + n, keys) : keys;
      for (i64 first = 0; first < last; first += kStripKeys) {
        const i64 count = std::min(kStripKeys, last - first);
        score(n, first, count);
        for (i64 r = 0; r < n; ++r) update_softmax(batch, head, m, r, first, count);
        values_.add(scores_.data(), n, first, count, sums_.data());
      }
      for (i64 r = 0; r < n; ++r) store_row(r, ((batch * c.queries + m + r) * c.heads + head) * c.value_width);
    }
    return query_stats.are_bf16() && key_stats.are_bf16() &&
           products_are_normal(query_stats.exponent(), key_stats.exponent());
  }

 private:
  i64 panel() const { return groups_ * 2 * kTileElems; }
  static const T* at(const void* x, const int64_t* stride, i64 batch, i64 head) {
    return static_cast<const T*>(x) + batch * stride[0] + head * stride[1];
  }

  void score(i64 n, i64 first, i64 count) {
    for (i64 i = 0; i < count; i += kNR) {
      const u16* keys = keys_.data() + (first + i) / kNR * panel();
      float* scores = scores_.data() + i;
      if (amx_) microkernel_32x32_amx(query_.data(), keys, groups_, scores, kScores);
      else microkernel_32x32_avx512(rows_, n, keys, 1, groups_ * kGroup, scores, kScores);
    }
  }

  // Turns a row's scores into weights, and rescales its sums so far by alpha if one of the scores is larger than m_i.
  void update_softmax(i64 batch, i64 head, i64 m, i64 r, i64 first, i64 count) {
    float* scores = scores_.data() + r * kScores;
    const i64 at = batch * c.mask_stride[0] + head * c.mask_stride[1] + (m + r) * c.mask_stride[2] + first;
    const i64 known = c.causal ? std::min(count, m + r + 1 - first) : count,
              end = (count + kTileRows - 1) / kTileRows * kTileRows;
    const T* additive = static_cast<const T*>(c.additive_mask);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (i64 i = 0; i < end; i += kTileRows) {
      __mmask16 mask = lanes(i, known);
      __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(c.factor));
      if (additive) x = _mm512_add_ps(x, known_values(additive + at + i, mask));
      if (c.bool_mask)
        mask &= _mm512_test_epi32_mask(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, c.bool_mask + at + i)),
                                       _mm512_set1_epi32(255));
      x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, x);
      _mm512_storeu_ps(scores + i, x);
      most = _mm512_max_ps(x, most);
    }
    const float m_new = std::max(m_i_[r], _mm512_reduce_max_ps(most));
    const float alpha = m_i_[r] == -INFINITY ? 0.0f : std::exp(m_i_[r] - m_new);
    if (alpha != 1.0f && first) {
      for (i64 i = 0; i < across_; ++i) sums_.data()[r * across_ + i] *= alpha;
    }
    l_i_[r] = l_i_[r] * alpha + softmax(scores, end, m_new);
    m_i_[r] = m_new;
  }

  void store_row(i64 r, i64 at) const {
    constexpr int32_t dtype = sizeof(T) == 4 ? FP32 : BF16;
    for (i64 i = 0; i < c.value_width; i += kNR) {
      Floats y[2];
      for (i64 h = 0; h < 2; ++h) y[h] = normalized(r, i + h * kTileRows, dtype);
      if (quantizer_) {
        quantizer_->quantize(y, 2);
        store_two(c.out, c.epilogue->out_dtype, at + i, y[0], y[1]);
        continue;
      }
      T values[kNR];
      store_two(values, dtype, 0, y[0], y[1]);
      std::copy(values, values + std::min(kNR, c.value_width - i), static_cast<T*>(c.out) + at + i);
    }
  }

  Floats normalized(i64 r, i64 i, int32_t dtype) const {
    const Floats y = load<Floats>(sums_.data() + r * across_ + i) / floats(l_i_[r] == 0.0f ? 1.0f : l_i_[r]);
    return rounded(y == y ? y : Floats(ints(0x7FC00000)), dtype);
  }

  const DenseAttentionCall& c;
  const VecQuantizer* const quantizer_;  // or null
  const i64 groups_, across_;            // groups of the width; values of a row of sums
  const bool amx_;
  AttentionPV<T> values_;
  Buffer<u16> keys_, query_;
  Buffer<float> scores_, sums_;
  const u16* rows_[kMR];
  float m_i_[kMR], l_i_[kMR];  // of each query: the largest score, and the sum of weights
};

template <class T>
void run_attention(i64 begin, i64 end, void* context) {
  Attention& attention = *static_cast<Attention*>(context);
  const DenseAttentionCall& c = attention.call;
  const KeepSubnormals keep;
  Head<T> head(attention);
  if (c.isa & AMX) configure_amx();
  for (i64 task = begin; task < end && !attention.unsupported; ++task) {
    const i64 pair = task / attention.down, top = task % attention.down * attention.rows;
    if (!head.run(pair / c.heads, pair % c.heads, top, std::min(top + attention.rows, c.queries))) {
      attention.unsupported = true;
    }
  }
  if (c.isa & AMX) release_amx();
}

}  // namespace

extern "C" {

int32_t pt2mx_dense_attention(const DenseAttentionCall* call, ParallelFor parallel_for) {
  const Epilogue* epilogue = call->epilogue;
  if (epilogue && !VecQuantizer::supports(*epilogue->spec, epilogue->block, call->value_width)) return kUnsupported;
  Attention attention(*call);
  const i64 tasks = call->batch * call->heads * attention.down;
  const auto run = call->dtype == BF16 ? run_attention<u16> : run_attention<float>;
  const int32_t error = parallel_for(0, tasks, 1, run, &attention);
  return error ? error : attention.unsupported ? kUnsupported : 0;
}

}  // extern "C"

#else

extern "C" {
int32_t pt2mx_dense_attention(const DenseAttentionCall*, ParallelFor) { return kUnsupported; }
}  // extern "C"

#endif
