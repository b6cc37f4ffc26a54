// attention_mx of a few queries by AMX: keys and values are decoded to bfloat16, which is exact, 32 slots at a time.
//
// A query is a sum of bfloat16 numbers, its parts: one in bfloat16, three in fp32. Each part is a row of the matmul, so
// scores are sums in fp32 of exact products. Softmax weights are parts too: two in 16-bit models, three in fp32.
//
// Scores are keys times queries, because a decoded key is a row of A. Weights times values have pairs of slots in B.

#pragma once

#include "attention_fp32.h"
#include "decode_rows_bf16.h"
#include "gemm_microkernel.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kSlots = 2 * kTileRows;  // slots that are decoded together

constexpr i64 kMaxRowsAmx = 64;  // queries of a head of the keys, as in ../attention.py
constexpr i64 kFewColumns = 4;   // of scores, which are gathered from a tile
constexpr i64 kBlocks = 4;       // of slots, whose values are multiplied together

// Splits 32 values into their highest 8 significant bits, the next 8, and so on, as bfloat16.
inline void split_parts(const float* x, i64 parts, i64 stride, u16* out) {
  Ints first = load<Ints>(x), second = load<Ints>(x + kWidth);
  for (i64 p = 0; p < parts; ++p, out += stride) {
    store_two(out, BF16, 0, Floats(first), Floats(second));
    first = Ints(Floats(first) - Floats(first & int32_t(0xFFFF0000)));
    second = Ints(Floats(second) - Floats(second & int32_t(0xFFFF0000)));
  }
}

// scores: (blocks, tiles of columns, kSlots, kTileRows) = keys: (blocks, groups, 2, kTileRows, kGroup) times queries:
// (tiles, groups, kTileRows pairs, kTileRows, 2).
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void score_amx(const u16* keys, const u16* queries, i64 blocks,
                                                                     i64 groups, i64 tiles, float* scores) {
  for (i64 block = 0; block < blocks; ++block, keys += groups * 2 * kTileElems) {
    const u16* columns = queries;
    for (i64 tile = 0; tile < tiles; ++tile, scores += kSlots * kTileRows) {
      _tile_zero(0);
      _tile_zero(1);
      for (i64 g = 0; g < groups; ++g, columns += kTileElems) {
        _tile_loadd(2, columns, 64);
        _tile_loadd(3, keys + g * 2 * kTileElems, 64);
        _tile_loadd(4, keys + g * 2 * kTileElems + kTileElems, 64);
        _tile_dpbf16ps(0, 3, 2);
        _tile_dpbf16ps(1, 4, 2);
      }
      _tile_stored(0, scores, 64);
      _tile_stored(1, scores + kTileRows * kTileRows, 64);
    }
  }
}

// sums: (groups, 2, rows, kTileRows) += weights: (blocks, rows, kSlots) times values: (blocks, groups, 2, kTileRows
// pairs, kTileRows, 2); rows: a multiple of those that AMX is configured for.
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void add_values_amx(const u16* weights, const u16* values,
                                                                          i64 blocks, i64 groups, i64 rows, i64 height,
                                                                          float* sums) {
  const i64 below = rows * kTileRows;
  for (i64 row = 0; row < rows; row += height) {
    for (i64 g = 0; g < groups; ++g) {
      float* sum = sums + 2 * g * below + row * kTileRows;
      _tile_loadd(5, sum, 64);
      _tile_loadd(6, sum + below, 64);
      for (i64 b = 0; b < blocks; ++b) {
        const u16* pairs = values + (b * groups + g) * 2 * kTileElems;
        _tile_loadd(7, weights + (b * rows + row) * kSlots, 64);
        _tile_loadd(2, pairs, 64);
        _tile_loadd(3, pairs + kTileElems, 64);
        _tile_dpbf16ps(5, 7, 2);
        _tile_dpbf16ps(6, 7, 3);
      }
      _tile_stored(5, sum, 64);
      _tile_stored(6, sum + below, 64);
    }
  }
}

// Eight tile registers as kTileConfig has them, but of fewer rows for weights and their sums: one for each number of
// rows.
struct HeightConfigs {
  TileConfig of[kTileRows + 1];
  constexpr HeightConfigs() {
    for (i64 height = 1; height <= kTileRows; ++height) {
      for (i64 tile = 5; tile < 8; ++tile) of[height].rows[tile] = u8(height);
    }
  }
};
const HeightConfigs kHeightConfigs;

__attribute__((target("amx-tile"))) NOINLINE void configure_amx(i64 height) {
  _tile_loadconfig(&kHeightConfigs.of[height]);
}

// What HeadsAmx computes in; a thread keeps it for its next call, because allocating it takes as long as attention over
// a few slots.
struct HeadsMemory {
  Buffer<u16> queries, keys, weights, values;
  Buffer<float> tile_scores, scores, sums;

  static HeadsMemory& of_thread() {
    static thread_local HeadsMemory memory;
    return memory;
  }
};

// The heads of the keys of some sequences, with their queries.
template <class Rows>
class HeadsAmx {
 public:
  explicit HeadsAmx(const PackedAttention& attention)
      : a(attention),
        c(a.call),
        groups_(c.width / kGroup),
        value_groups_(c.value_width / kGroup),
        query_parts_(c.dtype == FP32   ? 3
                     : c.dtype == FP16 ? 2
                                       : 1),
        weight_parts_(c.dtype == FP32 ? 3 : 2),
        tiles_((a.rows * query_parts_ + kTileRows - 1) / kTileRows),
        height(std::min(a.rows * weight_parts_, kTileRows)),
        weight_rows_((a.rows * weight_parts_ + height - 1) / height * height),
        stride_((c.slots + kSlots - 1) / kSlots * kSlots),
        scales_(c.table),
        key_rows_(a.keys, scales_),
        value_rows_(a.values, scales_),
        row_(std::max(c.width, c.value_width)) {
    queries_.resize(tiles_ * groups_ * kTileElems);
    keys_.resize(kBlocks * groups_ * 2 * kTileElems);
    tile_scores_.resize(kBlocks * tiles_ * kSlots * kTileRows);
    scores_.resize(a.rows * stride_);
    weights_.resize(kBlocks * weight_rows_ * kSlots);
    values_.resize(kBlocks * value_groups_ * 2 * kTileElems);
    sums_.resize(value_groups_ * 2 * weight_rows_ * kTileRows);
  }

  // Returns false if a query, a key or a value that counts is not finite or subnormal.
  bool run(i64 pair) {
    if (!set_queries(pair) || !score(pair)) return false;
    float l_i[kMaxRowsAmx];
    for (i64 r = 0; r < a.rows; ++r) {
      float* scores = scores_.data() + r * stride_;
      l_i[r] = softmax(scores, end_, largest_score(scores, end_));
    }
    if (!add_values(pair)) return false;
    for (i64 r = 0; r < a.rows; ++r) store_row(pair, r, l_i[r]);
    return true;
  }

  const PackedAttention& a;

 private:
  // Writes the parts of the queries: part `p` of query `r` is column p * rows + r.
  bool set_queries(i64 pair) {
    queries_.zero();
    bool finite = true;
    for (i64 r = 0; r < a.rows; ++r) {
      get_floats(c.query, (pair * a.rows + r) * c.width, c.width, c.dtype, row_.data());
      for (i64 i = 0; i < c.width; i += kGroup) {
        u16 parts[3][kGroup];
        split_parts(row_.data() + i, query_parts_, kGroup, parts[0]);
        for (i64 k = 0; k < kGroup; ++k) finite &= std::abs(row_[i + k]) < INFINITY;
        for (i64 p = 0; p < query_parts_; ++p) {
          const i64 column = p * a.rows + r;
          u16* out =
              queries_.data() + (column / kTileRows * groups_ + i / kGroup) * kTileElems + column % kTileRows * 2;
          for (i64 k = 0; k < kGroup; k += 2, out += kGroup) std::memcpy(out, parts[p] + k, 4);
        }
      }
    }
    return finite;
  }

  bool score(i64 pair) {
    const u8* masks[kMaxRowsAmx];
    for (i64 r = 0; r < a.rows; ++r) masks[r] = a.mask_of(pair, r);
    std::fill(scores_.data(), scores_.data() + a.rows * stride_, -INFINITY);
    end_ = 0;
    for (i64 begin = 0; begin < c.slots;) {
      u32 visible[kBlocks][kMaxRowsAmx];
      i64 blocks = 0, at[kBlocks];
      for (; begin < c.slots && blocks < kBlocks; begin += kSlots) {
        const i64 count = std::min(kSlots, c.slots - begin);
        u32 any = 0, *bits = visible[blocks];
        for (i64 r = 0; r < a.rows; ++r) {
          any |= bits[r] = r && masks[r] == masks[r - 1] ? bits[r - 1] : a.visible(masks[r], begin, count);
        }
        if (!any) continue;
        u16* keys = keys_.data() + blocks * groups_ * 2 * kTileElems;
        if (!decode_keys(pair * c.slots + begin, any, keys)) return false;
        at[blocks++] = begin;
        end_ = begin + kSlots;
      }
      score_amx(keys_.data(), queries_.data(), blocks, groups_, tiles_, tile_scores_.data());
      for (i64 b = 0; b < blocks; ++b)
        put_scores(visible[b], tile_scores_.data() + b * tiles_ * kSlots * kTileRows, at[b]);
    }
    return true;
  }

  // Decodes the keys of 32 slots that a query sees. The scores of the others, whose keys are old ones, are not
  // read. Returns false if one failed.
  TARGET_AVX512_VBMI NOINLINE bool decode_keys(i64 first, u32 any, u16* keys) const {
    Rows local = key_rows_;  // in registers
    const i64 groups = groups_;
    for (; any; any &= any - 1) {
      const i64 t = __builtin_ctz(any);
      local.start(first + t);
      u16* out = keys + t * kGroup;
      __m512i values[2];
      i64 g = 0;
      for (; g + 2 <= groups; g += 2, out += 4 * kTileElems) {
        local.template decode<2>(g, values);
        _mm512_storeu_si512(out, values[0]);
        _mm512_storeu_si512(out + 2 * kTileElems, values[1]);
      }
      if (g == groups) continue;
      local.template decode<1>(g, values);
      _mm512_storeu_si512(out, values[0]);
    }
    return !local.failed();
  }

  // Writes the scores of 32 slots. tiles: (tiles of columns, kSlots, kTileRows); of many columns it transposes them.
  void put_scores(const u32* visible, float* tiles, i64 first) {
    const __m512i rows = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
    const bool many = a.rows * query_parts_ > kFewColumns;
    for (i64 at = 0; many && at < 2 * tiles_; ++at)
      transpose(reinterpret_cast<u16*>(tiles + at * kTileRows * kTileRows));
    for (i64 r = 0; r < a.rows; ++r) {
      for (i64 half = 0; half < 2; ++half) {
        __m512 score = _mm512_setzero_ps();
        for (i64 p = 0; p < query_parts_; ++p) {
          const i64 column = p * a.rows + r, at = column % kTileRows;
          const float* tile = tiles + (column / kTileRows * 2 + half) * kTileRows * kTileRows;
          const __m512 part = many ? _mm512_loadu_ps(tile + at * kTileRows) : _mm512_i32gather_ps(rows, tile + at, 4);
          score = _mm512_add_ps(score, part);
        }
        _mm512_mask_storeu_ps(scores_.data() + r * stride_ + first + half * kTileRows,
                              __mmask16(visible[r] >> (half * kTileRows)),
                              _mm512_mul_ps(score, _mm512_set1_ps(a.factor)));
      }
    }
  }

  bool add_values(i64 pair) {
    sums_.zero();
    for (i64 first = 0; first < end_; first += kBlocks * kSlots) {
      i64 blocks = 0;
      for (i64 at = first; at < std::min(first + kBlocks * kSlots, end_); at += kSlots) {
        u32 used = 0;
        for (i64 r = 0; r < a.rows; ++r) used |= used_slots(scores_.data() + r * stride_ + at);
        if (!used) continue;
        for (i64 r = 0; r < a.rows; ++r) {
          split_parts(scores_.data() + r * stride_ + at, weight_parts_, a.rows * kSlots,
                      weights_.data() + (blocks * weight_rows_ + r) * kSlots);
        }
        u16* values = values_.data() + blocks * value_groups_ * 2 * kTileElems;
        if (!decode_values(pair * c.slots + at, used, values)) return false;
        ++blocks;
      }
      add_values_amx(weights_.data(), values_.data(), blocks, value_groups_, weight_rows_, height, sums_.data());
    }
    return true;
  }

  static u32 used_slots(const float* weights) {
    const __m512 zero = _mm512_setzero_ps();
    const u32 low = _mm512_cmpneq_ps_mask(_mm512_loadu_ps(weights), zero);
    return low | u32(_mm512_cmpneq_ps_mask(_mm512_loadu_ps(weights + kTileRows), zero)) << kTileRows;
  }

  // Decodes the values of 32 slots that have a weight, and pairs those of two slots; the others are zeros.
  // Interleaving halves of 128-bit lanes leaves columns 0-3, 8-11, .. in the first tile.
  TARGET_AVX512_VBMI NOINLINE bool decode_values(i64 first, u32 used, u16* out) const {
    Rows even = value_rows_, odd = value_rows_;  // in registers
    const i64 groups = value_groups_;
    for (i64 t = 0; t < kSlots; t += 2, used >>= 2, out += kGroup) {
      if (used & 1) even.start(first + t);
      if (used & 2) odd.start(first + t + 1);
      i64 g = 0;
      for (; g + 2 <= groups; g += 2) decode_pairs<2>(even, odd, used, g, out + 2 * g * kTileElems);
      if (g < groups) decode_pairs<1>(even, odd, used, g, out + 2 * g * kTileElems);
    }
    return !even.failed() && !odd.failed();
  }
  template <i64 kGroups>
  TARGET_AVX512_VBMI static void decode_pairs(Rows& even, Rows& odd, u32 used, i64 g, u16* out) {
    __m512i first[2] = {}, second[2] = {};
    if (used & 1) even.template decode<kGroups>(g, first);
    if (used & 2) odd.template decode<kGroups>(g, second);
    for (i64 i = 0; i < kGroups; ++i, out += 2 * kTileElems) {
      _mm512_storeu_si512(out, _mm512_unpacklo_epi16(first[i], second[i]));
      _mm512_storeu_si512(out + kTileElems, _mm512_unpackhi_epi16(first[i], second[i]));
    }
  }

  // A tile has every other four columns.
  void store_row(i64 pair, i64 r, float l_i) {
    for (i64 tile = 0; tile < 2 * value_groups_; ++tile) {
      Floats sum{};
      for (i64 p = 0; p < weight_parts_; ++p) {
        sum += load<Floats>(sums_.data() + (tile * weight_rows_ + p * a.rows + r) * kTileRows);
      }
      float* out = row_.data() + tile / 2 * kGroup + tile % 2 * 4;
      for (i64 i = 0; i < kTileRows; i += 4, out += 8) std::memcpy(out, reinterpret_cast<const float*>(&sum) + i, 16);
    }
    a.store_row(pair, r, l_i, row_.data());
  }

  const AttentionCall& c;
  const i64 groups_, value_groups_, query_parts_, weight_parts_, tiles_;

 public:
  const i64 height;  // rows of a tile of weights

 private:
  const i64 weight_rows_, stride_;
  i64 end_ = 0;  // of the blocks with slots that a query sees
  const RowScales scales_;
  const Rows key_rows_, value_rows_;
  std::vector<float> row_;
  HeadsMemory& memory_ = HeadsMemory::of_thread();
  Buffer<u16>&queries_ = memory_.queries, &keys_ = memory_.keys, &weights_ = memory_.weights, &values_ = memory_.values;
  Buffer<float>&tile_scores_ = memory_.tile_scores, &scores_ = memory_.scores, &sums_ = memory_.sums;
};

template <class Decoder, class Rows>
void run_heads_amx(i64 begin, i64 end, const PackedAttention& attention) {
  const KeepSubnormals keep;
  HeadsAmx<Rows> heads(attention);
  configure_amx(heads.height);
  for (i64 pair = begin; pair < end; ++pair) {
    for (i64 row = heads.run(pair) ? attention.rows : 0; row < attention.rows; row += kMaxRows) {
      HeadFp32<Decoder>(attention, pair, row, std::min(kMaxRows, attention.rows - row)).run();
    }
  }
  release_amx();
}

template <class Decoder>
void run_attention_amx(i64 begin, i64 end, void* context) {
  using LookUp = typename LookUpOf<Decoder>::type;
  const PackedAttention& attention = *static_cast<const PackedAttention*>(context);
  if (attention.call.float_scale) run_heads_amx<Decoder, RowsByFloats<Decoder>>(begin, end, attention);
  else run_heads_amx<Decoder, RowsByLookUp<LookUp>>(begin, end, attention);
}

}  // namespace

#endif
