// Shared by the kernels of attention_mx: the rows of the cache, the mask, and the results.

#pragma once

#include "linear.h"

namespace {

constexpr i64 kMaxWidth = 512;  // as in ../attention.py

// The rows of keys or values of all heads.
struct CacheRows {
  LinearCall call{};
  u8 block_of[kMaxWidth / kGroup];  // of a group

  CacheRows(const AttentionCall& c, const u8* codes, const u8* scale, i64 bytes, i64 blocks, i64 width, i64 block) {
    call.table = c.table;
    call.float_scale = c.float_scale;
    call.tensor_scale = 1;
    call.data = codes;
    call.scale = scale;
    call.row_bytes = bytes;
    call.row_blocks = blocks;
    call.k = width;
    call.block = block;
    for (i64 g = 0; g < width / kGroup; ++g) block_of[g] = u8(g * kGroup / block);
  }
};

struct PackedAttention {
  AttentionCall& call;
  const i64 rows;                    // queries of a head of the keys
  const float factor, value_factor;  // of the scores and of the result
  const CacheRows keys, values;

  explicit PackedAttention(AttentionCall& c)
      : call(c),
        rows(c.group * c.queries),
        factor(c.factor * of_tensor(c, c.key_tensor_scale)),
        value_factor(of_tensor(c, c.value_tensor_scale)),
        keys(c, c.key, c.key_scale, c.key_bytes, c.key_blocks, c.width, c.block),
        values(c, c.value, c.value_scale, c.value_bytes, c.value_blocks, c.value_width, c.value_block) {}

  // Returns the mask of query `r` of a head of the keys; null without one.
  const u8* mask_of(i64 pair, i64 r) const {
    if (!call.mask) return nullptr;
    const i64 head = pair % call.heads * call.group + r / call.queries;
    return call.mask + pair / call.heads * call.mask_batch + head * call.mask_head + r % call.queries * call.mask_query;
  }

  // Returns a bit for each of the slots [first, first + count), at most 32: whether a query sees it.
  u32 visible(const u8* mask, i64 first, i64 count) const {
    if (!mask) return ~0u >> (32 - count);
    const u8* from = mask + first * call.mask_slot;
    u32 bits = 0;
#if defined(__AVX512BW__)
    if (call.mask_slot == 1) {
      const __m256i bytes = _mm256_maskz_loadu_epi8(~0u >> (32 - count), from);
      return _mm256_test_epi8_mask(bytes, bytes);
    }
#endif
    for (i64 t = 0; t < count; ++t) bits |= u32(from[t * call.mask_slot] != 0) << t;
    return bits;
  }

  // Stores a row of sums of weights times values, divided by the sum of the weights.
  void store_row(i64 pair, i64 r, float sum_of_weights, float* row) const {
    const float l_i = sum_of_weights == 0.0f ? 1.0f : sum_of_weights, factor = value_factor;
#pragma omp simd
    for (i64 i = 0; i < call.value_width; ++i) row[i] = row[i] / l_i * factor;
    put_floats(row, call.value_width, call.dtype, call.out, (pair * rows + r) * call.value_width);
  }

 private:
  static float of_tensor(const AttentionCall& c, float scale) {
    return c.float_scale ? applied(1, *c.float_scale, scale) : 1;
  }
};

}  // namespace
