// linear_mx of up to 4 rows of x whose values, like the weight's, are 8-bit integers times one power of two per group.
// Rows of the weight are multiplied as they lie in memory, which takes fewer instructions than moving their codes to
// columns (int8_columns.h): the memory limits it.
//
// A span is the codes whose products make kLanes sums of 32 bits, which are exact: lanes of group 0, of group 1, and so
// on. One multiply-add applies both scales, and each lane adds its sums in fp32 span by span. Then the lanes are added.
// So a sum has one order with every instruction set.

#pragma once

#include <atomic>
#include <vector>

#include "dot_int8_neon.h"
#include "dot_int8_x86.h"
#include "linear.h"

namespace {

constexpr i64 kDotRows = 4;  // most rows of x

}  // namespace

#if defined(PT2MX_HAVE_DOT_INT8)

namespace {

constexpr i64 kDotAhead = 2048;                 // bytes from the codes being decoded to those prefetched, as measured
constexpr i64 kDotTiles = 64;                   // whose results are stored together
constexpr i64 kPastCodes = 4, kPastScales = 3;  // bytes after a span that are read

template <class Decoder>
struct DotInt8 {
  using Columns = IntegerColumns<Decoder>;
  static constexpr i64 kVectors = Columns::kRowVectors;           // of 4 * kLanes codes in a span
  static constexpr i64 kGroups = kVectors * 4 * kLanes / kGroup;  // of a span
  static constexpr i64 kGroupLanes = kLanes / kGroups;
  static constexpr i64 kBytes = kGroups * Decoder::kBytes;

  // Returns the group of the first lane of a part of a span.
  static constexpr i64 part_group(int part) {
    return kWidth < kGroupLanes ? part / (kGroupLanes / kWidth) : part * (kWidth / kGroupLanes);
  }

  struct Span {  // of a row of x
    u8 codes[kVectors][4 * kLanes];
    int32_t offsets[kLanes];  // initial values of sums, as in CodeGroup
    int32_t powers[kLanes];   // as in CodeGroup, without the weight's shift
  };

  const Linear& linear;
  const Columns columns;
  const i64 spans;  // of a row
  const Scratch<OF_X> scratch;
  Span* const x;            // (spans, m)
  ExponentRange exponents;  // of x
  std::atomic<bool> unsupported{false};

  explicit DotInt8(const Linear& linear)
      : linear(linear),
        columns(linear.call.table),
        spans((linear.groups + kGroups - 1) / kGroups),
        scratch(spans * linear.call.m * i64(sizeof(Span))),
        x(reinterpret_cast<Span*>(scratch.data())) {
    for (i64 m = 0; m < linear.call.m && !unsupported; ++m) encode(m);
  }

  // Returns the row from which on spans would be read past the end of the weight.
  i64 rows_in_place() const {
    const LinearCall& c = linear.call;
    const i64 codes = spans * kBytes + kPastCodes, scales = spans * kGroups + kPastScales;
    return c.n + 1 - std::max((codes + c.row_bytes - 1) / c.row_bytes, (scales + c.row_blocks - 1) / c.row_blocks);
  }

  // Converts a row of x to codes, up to a value without one.
  void encode(i64 m) {
    const LinearCall& c = linear.call;
    const KeepSubnormals keep;
    CodeGroup group{};
    for (i64 s = 0; s < spans; ++s) {
      Span& span = x[s * c.m + m];
      const i64 first = s * kGroups * kGroup;
      float values[kGroups * kGroup] = {};
      get_floats(c.x, m * c.k + first, std::min(kGroups * kGroup, c.k - first), c.dtype, values);
      for (i64 g = 0; g < kGroups; ++g) {
        if (first + g * kGroup < c.k) {
          int32_t exponent;
          if (!to_codes(values + g * kGroup, &group, &exponent)) {
            unsupported = true;
            return;
          }
          exponents.add(exponent);
        } else {
          std::memset(group.codes, 0, kGroup);
        }
        const int32_t power = group.power - columns.shift * (1 << 23);
        std::fill_n(span.powers + g * kGroupLanes, kGroupLanes, power);
        if constexpr (kVectors == 1) {
          std::memcpy(span.codes[0] + g * kGroup, group.codes, kGroup);
        } else {
          split_even_odd(group.codes, span.codes[0] + g * kGroup / 2, span.codes[1] + g * kGroup / 2);
        }
      }
      for (int p = 0; p < kSpanParts; ++p) {
        Bytes ones[kVectors];
        for (Bytes& codes : ones) codes = each_byte(1);
        const Ints sums = Ints(dot<Columns, kLeastIsa>(Bytes{}, ones, span.codes[0] + 4 * p * kWidth));
        store(span.offsets + p * kWidth, sums * -columns.offset);
      }
    }
  }
};

// Writes tiles of kDotTile rows of the weight times R rows of x to y: (tiles, R, kDotTile). Row q of the first tile is
// at codes[q] and scales[q], and each tile has the next rows.
template <class Decoder, int kIsa, int R>
NOINLINE void dot_tiles(const DotInt8<Decoder>& int8, const u8* const* codes, const u8* const* scales, i64 tiles,
                        float* y) {
  using Sizes = DotInt8<Decoder>;
  using Columns = typename Sizes::Columns;
  constexpr int Q = kWidth == 16 || R == 1 ? kDotTile : R == 2 ? 2 : 1;  // rows whose totals fit in registers
  constexpr i64 kPartBytes = Sizes::kBytes / kSpanParts;
  const LaneScales<Sizes::kGroupLanes> lane_scales;
  const Columns decoder = int8.columns;  // a copy stays in registers
  const i64 row_bytes = int8.linear.call.row_bytes, row_blocks = int8.linear.call.row_blocks, spans = int8.spans;
  for (i64 i = 0; i < tiles; ++i, y += R * kDotTile) {
    Floats totals[kDotTile][R][kSpanParts];
    for (int top = 0; top < kDotTile; top += Q) {
      Floats total[Q][R][kSpanParts] = {};
      const typename Sizes::Span* x = int8.x;
      i64 at = i * row_bytes, scale_at = i * row_blocks;
      for (i64 s = 0; s < spans; ++s, x += R, at += Sizes::kBytes, scale_at += Sizes::kGroups) {
        for (int q = 0; q < Q; ++q) {
          const u8 *data = codes[top + q] + at, *scale = scales[top + q] + scale_at;
          __builtin_prefetch(data + kDotAhead);
          for (int p = 0; p < kSpanParts; ++p) {
            Bytes w[Sizes::kVectors];
            decoder.template decode_row<kIsa>(data + p * kPartBytes, w);
            const Ints powers = lane_scales.powers(scale + Sizes::part_group(p));
            for (int r = 0; r < R; ++r) {
              const Bytes sums =
                  dot<Columns, kIsa>(load<Bytes>(x[r].offsets + p * kWidth), w, x[r].codes[0] + 4 * p * kWidth);
              const Ints factors = powers + load<Ints>(x[r].powers + p * kWidth);
              total[q][r][p] = fused(to_floats(sums), Floats(factors), total[q][r][p]);
            }
          }
        }
      }
      std::memcpy(totals[top], total, sizeof total);
    }
    for (int r = 0; r < R; ++r) sum_lanes(totals[0][r], R * kSpanParts, y + r * kDotTile);
  }
}

template <class Decoder>
using DotKernel = void (*)(const DotInt8<Decoder>&, const u8* const*, const u8* const*, i64, float*);

template <class Decoder>
DotKernel<Decoder> dot_kernel(const LinearCall& c) {
  return with_dot_isa(c.integer_isa, [&](auto isa) {
    static constexpr DotKernel<Decoder> kernels[] = {dot_tiles<Decoder, isa(), 1>, dot_tiles<Decoder, isa(), 2>,
                                                     dot_tiles<Decoder, isa(), 3>, dot_tiles<Decoder, isa(), 4>};
    return kernels[c.m - 1];
  });
}

// Copies of codes and scales of a tile that cannot be read in place: at the end of the weight; scales of larger blocks,
// or out of range, too.
template <class Decoder>
struct TileCopy {
  using Sizes = DotInt8<Decoder>;
  std::vector<u8> codes, scales;

  // Copies the codes of rows: (kDotTile), and points codes_of: (kDotTile) to them.
  void read_codes(const DotInt8<Decoder>& int8, const i64* rows, const u8** codes_of) {
    const LinearCall& c = int8.linear.call;
    const i64 bytes = int8.spans * Sizes::kBytes + kPastCodes;
    codes.assign(kDotTile * bytes, 0);
    for (i64 q = 0; q < kDotTile; ++q) {
      u8* out = codes.data() + q * bytes;
      std::memcpy(out, c.data + rows[q] * c.row_bytes, c.row_bytes);
      codes_of[q] = out;
    }
  }

  // Copies the scales of the rows, and points scales_of: (kDotTile) to them. Returns false if the scale of other codes
  // than zeros is out of range.
  bool read_scales(const DotInt8<Decoder>& int8, const ScaleRange& range, const i64* rows, const u8** scales_of) {
    const LinearCall& c = int8.linear.call;
    const i64 stride = int8.spans * Sizes::kGroups + kPastScales, per_block = c.block / kGroup;
    const u8 usual = u8(kBias + int8.columns.shift);
    scales.assign(kDotTile * stride, usual);
    for (i64 q = 0; q < kDotTile; ++q) {
      const i64 at = rows[q], groups = int8.linear.groups;
      const u8* byte = c.scale + at * c.row_blocks;
      u8* out = scales.data() + q * stride;
      scales_of[q] = out;
      if (per_block == 1) std::memcpy(out, byte, groups);
      // a division for each group would take as long as the matmul
      for (i64 g = 0, last = 0; per_block > 1 && g < groups; ++byte) {
        for (last = std::min(groups, last + per_block); g < last; ++g) out[g] = *byte;
      }
      if (ByteRange(out, groups).is_within(range.least, range.most)) continue;
      for (i64 g = 0; g < groups; ++g) {
        if (out[g] >= range.least && out[g] <= range.most) continue;
        const u8* data = c.data + at * c.row_bytes + g * Decoder::kBytes;
        if (out[g] == 255 || !are_zeros(int8, data, row_values(c, g))) return false;
        out[g] = usual;
      }
    }
    return true;
  }

 private:
  static i64 row_values(const LinearCall& c, i64 group) { return std::min(kGroup, c.k - group * kGroup); }

  // True if the first n codes of a group are zeros.
  static bool are_zeros(const DotInt8<Decoder>& int8, const u8* data, i64 n) {
    u8 group[Sizes::kBytes + kPastCodes] = {};
    std::memcpy(group, data, (n * int8.linear.call.bits + 7) / 8);
    if (const i64 rest = n * int8.linear.call.bits % 8) group[n * int8.linear.call.bits / 8] &= (1 << rest) - 1;
    Bytes w[Sizes::kVectors];
    int8.columns.template decode_row<kLeastIsa>(group, w);
    Bytes others{};
    for (const Bytes& codes : w) others |= codes ^ each_byte(u8(int8.columns.offset));
    return !any_bit(Ints(others));
  }
};

// True if the scales from row `row` on, and those that a span reads after them, are in range.
template <class Decoder>
bool are_usual(const DotInt8<Decoder>& int8, const ScaleRange& range, i64 row, i64 rows) {
  const LinearCall& c = int8.linear.call;
  if (c.block != kGroup) return false;
  const i64 next = int8.spans * DotInt8<Decoder>::kGroups - c.row_blocks;
  return scales_of_rows(c, row, rows, next).is_within(range.least, range.most);
}

template <class Decoder>
void run_dot_int8(i64 begin, i64 end, void* context) {
  using Sizes = DotInt8<Decoder>;
  Sizes& int8 = *static_cast<Sizes*>(context);
  const LinearCall& c = int8.linear.call;
  const DotKernel<Decoder> kernel = dot_kernel<Decoder>(c);
  const ScaleRange range(int8.columns.shift, int8.exponents);
  const i64 in_place = int8.rows_in_place();
  const KeepSubnormals keep;
  static thread_local TileCopy<Decoder> copy;  // keeps its memory
  // Row q of each tile is from quarter q of the rows: memory delivers four streams faster than one.
  const i64 first = begin * kDotTile, last = std::min(end * kDotTile, c.n);
  const i64 quarter = (last - first + kDotTile - 1) / kDotTile;
  for (i64 at = 0; at < quarter && !int8.unsupported; at += kDotTiles) {
    const i64 tiles = std::min(kDotTiles, quarter - at);
    i64 top[kDotTile], rows[kDotTile];  // of each quarter
    bool usual = true;
    for (i64 q = 0; q < kDotTile; ++q) {
      top[q] = std::min(first + q * quarter + at, last);
      rows[q] = std::min(tiles, last - top[q]);
      usual &= !rows[q] || are_usual(int8, range, top[q], rows[q]);
    }
    float y[kDotTiles * kDotRows * kDotTile];  // (tiles, m, kDotTile)
    for (i64 i = 0, count; i < tiles; i += count) {
      i64 row[kDotTile];
      const u8 *codes[kDotTile], *scales[kDotTile];
      for (i64 q = 0; q < kDotTile; ++q) {
        row[q] = std::min(top[q] + i, last - 1);
        codes[q] = c.data + row[q] * c.row_bytes;
        scales[q] = c.scale + row[q] * c.row_blocks;
      }
      count = usual ? std::min(rows[kDotTile - 1], in_place - top[kDotTile - 1]) - i : 0;
      if (count <= 0) {  // a tile of copies
        count = 1;
        if (!copy.read_scales(int8, range, row, scales)) {
          int8.unsupported = true;
          return;
        }
        if (row[kDotTile - 1] >= in_place) copy.read_codes(int8, row, codes);
      }
      kernel(int8, codes, scales, count, y + i * c.m * kDotTile);
    }
    for (i64 m = 0; m < c.m; ++m) {
      for (i64 q = 0; q < kDotTile; ++q) {
        float of_rows[kDotTiles];
        for (i64 i = 0; i < rows[q]; ++i) of_rows[i] = y[(i * c.m + m) * kDotTile + q];
        finish(int8.linear, m, top[q], rows[q], of_rows);
      }
    }
  }
}

// Returns kUnsupported, and computes nothing, for values without codes.
template <class Decoder>
int32_t dot_int8(const Linear& linear, ParallelFor parallel_for) {
  const LinearCall& c = linear.call;
  DotInt8<Decoder> int8(linear);
  if (int8.unsupported) return kUnsupported;
  const i64 grain = std::max<i64>(1, (1 << 18) / (kDotTile * c.m * c.k));
  const int32_t error = parallel_for(0, (c.n + kDotTile - 1) / kDotTile, grain, run_dot_int8<Decoder>, &int8);
  return error ? error : int8.unsupported ? kUnsupported : 0;
}

}  // namespace

#else

namespace {

template <class Decoder>
int32_t integer_isa_for(const float*) {
  return 0;
}
template <class Decoder>
int32_t dot_int8(const Linear&, ParallelFor) {
  return kUnsupported;
}

}  // namespace

#endif
