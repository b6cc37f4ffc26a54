// linear_mx of 5 to 32 rows of x whose values, like the weight's, are 8-bit integers times one power of two per group:
// by vpmaddubsw of AVX2 and AVX-512, by vpdpbusd of AVX_VNNI and AVX512_VNNI, or by AMX.
//
// Codes are decoded once for all rows of x, a strip of groups at a time. Sums of a group are exact, one multiply-add a
// group applies both scales, and sums of a row are in fp32, in the order of gemm_int8.h: results have the same bits
// with every instruction set.

#pragma once

#include <atomic>
#include <mutex>

#include "int8_amx.h"
#include "int8_microkernel.h"
#include "int8_strip.h"
#include "linear.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

constexpr i64 kStripsAhead = 4;  // from the strip being multiplied to the one being prefetched, as measured

struct LinearInt8 {
  const Linear& linear;
  const bool amx;
  Buffer<CodeGroup> x;      // (m, groups), without AMX
  CodeTiles tiles;          // x, with AMX
  ExponentRange exponents;  // of x
  std::mutex mutex;         // of `exponents`
  std::atomic<bool> unsupported{false};

  explicit LinearInt8(const Linear& linear)
      : linear(linear), amx(linear.call.integer_isa & TDPBSSD && linear.call.m >= kRowsOfAmx) {
    if (amx) tiles.resize(linear.call.m, linear.groups);
    else x.resize(linear.call.m * linear.groups);
  }
};

// Converts a group of a row of x. Returns false if a value has no code.
inline bool encode_group(const LinearCall& c, i64 m, i64 g, CodeGroup* out, int32_t* exponent) {
  const i64 first = g * kGroup;
  float values[kGroup] = {};
  get_floats(c.x, m * c.k + first, std::min(kGroup, c.k - first), c.dtype, values);
  return to_codes(values, out, exponent);
}

// Converts rows of x to codes, in the order of the decoder.
template <class Columns>
void encode_rows(i64 begin, i64 end, void* context) {
  LinearInt8& int8 = *static_cast<LinearInt8*>(context);
  const LinearCall& c = int8.linear.call;
  const KeepSubnormals keep;
  const int32_t offset = Columns(c.table).offset;
  ExponentRange range;
  for (i64 m = begin; m < end && !int8.unsupported; ++m) {
    CodeGroup group;
    for (i64 g = 0; g < int8.linear.groups; ++g) {
      CodeGroup* out = int8.amx ? &group : int8.x.data() + m * int8.linear.groups + g;
      int32_t exponent;
      if (!encode_group(c, m, g, out, &exponent)) {
        int8.unsupported = true;
        return;
      }
      range.add(exponent);
      out->offset *= -offset;
      if (Columns::kEvenOdd) store(out->codes, to_even_odd(load256(out->codes)));
      if (int8.amx) int8.tiles.put(m, g, group);
    }
  }
  const std::lock_guard<std::mutex> lock(int8.mutex);
  int8.exponents.add(range);
}

template <class Decoder>
void run_linear_int8(i64 begin, i64 end, void* context) {
  using Columns = IntegerColumns<Decoder>;
  LinearInt8& int8 = *static_cast<LinearInt8*>(context);
  const LinearCall& c = int8.linear.call;
  const i64 groups = int8.linear.groups;
  const Columns columns(c.table, int8.amx);
  const MultiplyStrip* kernels = strip_kernels<Columns::kWideSums>(c.integer_isa);
  const ScaleRange range(columns.shift, int8.exponents);
  const KeepSubnormals keep;
  Strip<Decoder> strip;
  GroupColumns w[kStripGroups];
  alignas(64) float totals[kFewRows * kWidth];
  for (i64 tile = begin; tile < end && !int8.unsupported; ++tile) {
    const i64 row = tile * kWidth;
    std::fill(totals, totals + c.m * kWidth, 0);
    if (int8.amx) int8.tiles.configure();
    for (i64 first = 0; first < groups; first += kStripGroups) {
      const i64 count = std::min(kStripGroups, groups - first);
      const i64 ahead = first + kStripsAhead * kStripGroups, next_row = row + ahead / groups * kWidth;
      strip.read(c, c.row_bytes, row, first, count);
      for (i64 g = 0; g < count; ++g) {
        columns.decode(strip.codes + g * Decoder::kBytes, strip.kBytes, w[g].codes);
        strip.prefetch(c, next_row, ahead % groups, g);
      }
      if (!set_powers(strip.scales, count, columns.shift, range, u8(columns.offset), w)) {
        int8.unsupported = true;
        break;
      }
      if (int8.amx) int8.tiles.multiply(w, first, count, totals);
      for (i64 m = 0, rows; m < c.m && !int8.amx; m += rows) {
        const int log = c.m - m >= 8 ? 3 : c.m - m >= 4 ? 2 : c.m - m >= 2 ? 1 : 0;
        const CodeGroup* x[8];
        rows = 1 << log;
        for (i64 r = 0; r < rows; ++r) x[r] = int8.x.data() + (m + r) * groups + first;
        kernels[log](w, count, x, totals + m * kWidth);
      }
    }
    for (i64 m = 0; m < c.m; ++m) finish(int8.linear, m, row, std::min(kWidth, c.n - row), totals + m * kWidth);
  }
  if (int8.amx) CodeTiles::release();
}

// Returns kUnsupported, and computes nothing, for values without codes.
template <class Decoder>
int32_t linear_int8(const Linear& linear, ParallelFor parallel_for) {
  using Columns = IntegerColumns<Decoder>;
  const LinearCall& c = linear.call;
  CodeGroup group;
  int32_t exponent;
  if (!encode_group(c, 0, 0, &group, &exponent)) return kUnsupported;  // before memory for codes is allocated
  LinearInt8 int8(linear);
  encode_rows<Columns>(0, 1, &int8);  // if the first row has no codes, no thread starts
  if (!int8.unsupported) {
    const i64 grain = std::max<i64>(1, (1 << 13) / c.k);
    if (const int32_t error = parallel_for(1, c.m, grain, encode_rows<Columns>, &int8)) return error;
  }
  if (int8.unsupported) return kUnsupported;
  const i64 grain = std::max<i64>(1, (1 << 18) / (kWidth * c.m * c.k));
  const int32_t error = parallel_for(0, (c.n + kWidth - 1) / kWidth, grain, run_linear_int8<Decoder>, &int8);
  return error ? error : int8.unsupported ? kUnsupported : 0;
}

}  // namespace

#else

namespace {

template <class Decoder>
int32_t linear_int8(const Linear&, ParallelFor) {
  return kUnsupported;
}

}  // namespace

#endif
