// linear_mx of up to 32 rows of x in bfloat16 or fp32 by AMX: 32 rows of the weight are decoded to bfloat16 a chunk at
// a time and multiplied with all of x, with sums in fp32. A value in fp32 is the sum of three bfloat16 values, of its
// leading, middle and last eight bits, so x has three times as many rows, unless bfloat16 represents all of its values.
//
// AMX treats subnormal numbers as zero, as torch's own bfloat16 matmul does. linear_fp32.h multiplies rows of the
// weight with such values, and rows with codes that have to be looked up. For x in fp32 no product may be subnormal:
// values and scales that could have such products are left to linear_fp32.h, too.

#pragma once

#include <vector>

#include "decode_bf16.h"
#include "linear_fp32.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

// Of values in fp32 and scales: their products, even with the last bits of a value, are normal.
constexpr i64 kMinExponent = kBias - 40, kMaxExponent = kBias + 40;

struct LinearAmx {
  Linear& linear;
  const i64 parts, panels;  // of a value; of 32 rows, which parts of values fill one after the other
  const i64 panel;          // values of a panel
  Buffer<u16> x;            // (panels, groups, 2, kTileRows pairs of values, kTileRows rows, 2)

  explicit LinearAmx(Linear& linear)
      : linear(linear),
        parts(linear.call.dtype == FP32 && !are_bfloats(linear.call) ? 3 : 1),
        panels((linear.call.m * parts + kMR - 1) / kMR),
        panel(linear.groups * 2 * kTileElems) {
    const LinearCall& c = linear.call;
    const i64 stride = linear.groups * kGroup;
    x.resize(panels * panel);
    std::vector<u16> values(3 * stride);
    for (i64 m = 0; m < c.m; ++m) {
      if (c.dtype == FP32) split(static_cast<const float*>(c.x) + m * c.k, c.k, values.data(), stride);
      else std::memcpy(values.data(), static_cast<const u16*>(c.x) + m * c.k, 2 * c.k);
      for (i64 p = 0; p < parts; ++p) {
        const u16* pair = values.data() + p * stride;
        for (u16* out = row_of(p * c.m + m); pair < values.data() + (p + 1) * stride; out += kTileElems) {
          for (i64 i = 0; i < kTileRows; ++i, out += 2 * kTileRows, pair += 2) std::memcpy(out, pair, 4);
        }
      }
    }
  }

  // True if bfloat16 represents all of x, in fp32.
  static bool are_bfloats(const LinearCall& c) {
    u32 last = 0;
#pragma omp simd reduction(| : last)
    for (i64 i = 0; i < c.m * c.k; ++i) last |= bits_of(static_cast<const float*>(c.x)[i]) & 0xFFFF;
    return !last;
  }

  // Writes the three bfloat16 values, `stride` apart, of each of n values in fp32.
  static void split(const float* values, i64 n, u16* out, i64 stride) {
#pragma omp simd
    for (i64 i = 0; i < n; ++i) {
      const float first = from_bits(bits_of(values[i]) & 0xFFFF0000), rest = values[i] - first;
      const float second = from_bits(bits_of(rest) & 0xFFFF0000), third = rest - second;
      out[i] = u16(bits_of(first) >> 16);
      out[stride + i] = u16(bits_of(second) >> 16);
      out[2 * stride + i] = u16(bits_of(third) >> 16);
    }
  }

  // Where a row starts in a panel of x.
  u16* row_of(i64 row) {
    return x.data() + row / kMR * panel + row % kMR / kTileRows * kTileElems + row % kTileRows * 2;
  }

  // Returns the sums of a row, kTileRows apart, of `sums` as accumulate_amx writes them for each panel.
  static const float* sums_of(const float* sums, i64 row) {
    return sums + row / kMR * kNR * kMR + row % kMR / kTileRows * kTileRows * kTileRows + row % kTileRows;
  }

  bool supports() const {
    const LinearCall& c = linear.call;
    if (c.dtype == BF16) return true;
    if (c.dtype != FP32 || c.float_scale) return false;
    u32 outside = 0;
#pragma omp simd reduction(| : outside)
    for (i64 i = 0; i < c.m * c.k; ++i) {
      const u32 magnitude = bits_of(static_cast<const float*>(c.x)[i]) & kMagnitude;
      outside |= u32(magnitude && magnitude - (kMinExponent << 23) > (kMaxExponent - kMinExponent) << 23);
    }
    return !outside;
  }
  // True if all scales of kNR rows of the weight from `row` on fit the values of x.
  bool supports_scales(i64 row) const {
    const LinearCall& c = linear.call;
    if (c.dtype == BF16) return true;
    return scales_of_rows(c, row, std::min(kNR, c.n - row)).is_within(kMinExponent, kMaxExponent);
  }
};

// sums: (2, 2, kTileRows, kTileRows) += w: (groups, 2, kTileRows, kGroup) times x: (groups, 2, kTileRows, kTileRows,
// 2). The tiles lie as in the drawing of gemm_microkernel.h, with the weight as the left operand. Without `full` x has
// up to 16 rows, and its second tile is skipped. The sum of the groups is computed first, because a sum of partial sums
// is more exact.
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void accumulate_amx(const u16* w, const u16* x, i64 groups,
                                                                          bool full, float* sums) {
  constexpr i64 kSums = kTileRows * kTileRows;
  alignas(64) float strip[4 * kSums];
  _tile_zero(0);
  _tile_zero(2);
  if (full) {
    _tile_zero(1);
    _tile_zero(3);
    for (i64 g = 0; g < groups; ++g, w += 2 * kTileElems, x += 2 * kTileElems) {
      _tile_loadd(4, w, 64);
      _tile_loadd(6, x, 64);
      _tile_loadd(5, w + kTileElems, 64);
      _tile_loadd(7, x + kTileElems, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(1, strip + kSums, 64);
    _tile_stored(3, strip + 3 * kSums, 64);
  } else {
    for (i64 g = 0; g < groups; ++g, w += 2 * kTileElems, x += 2 * kTileElems) {
      _tile_loadd(6, x, 64);
      _tile_loadd(4, w, 64);
      _tile_loadd(5, w + kTileElems, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  _tile_stored(0, strip, 64);
  _tile_stored(2, strip + 2 * kSums, 64);
  for (i64 t = 0; t < 4; t += full ? 1 : 2) {
    for (i64 i = t * kSums; i < (t + 1) * kSums; ++i) sums[i] += strip[i];
  }
}

template <class Decoder>
void run_linear_amx(i64 begin, i64 end, void* context) {
  const LinearAmx& amx = *static_cast<const LinearAmx*>(context);
  const LinearCall& c = amx.linear.call;
  const i64 groups = amx.linear.groups;
  const KeepSubnormals keep;
  Buffer<u16> w;
  Buffer<float> sums;  // (panels, 2, 2, kTileRows rows of the weight, kTileRows rows of x)
  w.resize(kChunkGroups * 2 * kTileElems);
  sums.resize(amx.panels * kNR * kMR);
  for (i64 row = begin * kNR; row < std::min(end * kNR, c.n); row += kNR) {
    Decoder decoder(c);
    bool unsupported = !amx.supports_scales(row);
    sums.zero();
    configure_amx();
    for (i64 g = 0; g < groups && !unsupported; g += kChunkGroups) {
      const i64 count = std::min(kChunkGroups, groups - g);
      unsupported = decode_chunk(c, decoder, row, g, g + count, w.data());
      for (i64 p = 0; p < amx.panels; ++p) {
        const bool full = c.m * amx.parts - p * kMR > kTileRows;
        const u16* x = amx.x.data() + p * amx.panel + g * 2 * kTileElems;
        accumulate_amx(w.data(), x, count, full, sums.data() + p * kNR * kMR);
      }
    }
    if (unsupported || decoder.invalid()) {
      prepare_once(amx.linear, Decoder::kEvenOdd);
      run<Decoder, 4>(row / kRows, (std::min(row + kNR, c.n) + kRows - 1) / kRows, &amx.linear);
      continue;
    }
    for (i64 m = 0; m < c.m; ++m) {
      float y[kNR] = {};
      for (i64 p = amx.parts - 1; p >= 0; --p) {  // the smallest parts first
        const float* from = amx.sums_of(sums.data(), p * c.m + m);
        for (i64 q = 0; q < kNR; ++q) y[q] += from[(q / kTileRows * 2 * kTileRows + q % kTileRows) * kTileRows];
      }
      for (float& sum : y) sum *= amx.linear.result_factor;
      finish(amx.linear, m, row, std::min(kNR, c.n - row), y);
    }
  }
  release_amx();
}

template <class Decoder>
int32_t linear_amx(Linear& linear, ParallelFor parallel_for) {
  LinearAmx amx(linear);
  if (!amx.supports()) return kUnsupported;
  return parallel_for(0, (linear.call.n + kNR - 1) / kNR, 1, run_linear_amx<Decoder>, &amx);
}

}  // namespace

#endif
