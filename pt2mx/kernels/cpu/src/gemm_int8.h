// The GEMM of many rows of x for values of x and weights that are 8-bit integer codes times one power of two per group:
// by vpmaddubsw of AVX2 and AVX-512, or by vpdpbusd of AVX_VNNI and AVX512_VNNI.
//
// x is given as values. The kernel converts them to codes, and computes nothing if a value has no code. A task decodes
// some rows of the weight to panels of codes. Sums of a group are exact; sums of a row are in fp32, in one order. The
// powers of two of x and of the weight are multiplied by adding their exponent bits as integers. If the result could be
// no normal number, or the weight has a NaN, the kernel computes nothing either. The caller then uses another kernel.

#pragma once

#include <atomic>
#include <mutex>

#include "epilogue.h"
#include "int8_gemm_microkernel.h"
#include "int8_strip.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

// Micro-tiles that are multiplied with a panel of columns while it is in the L1 cache.
constexpr i64 kTilesOfPanel = 16;

// ---- x ----

struct GemmInt8 {
  const Linear& linear;
  const Int8Kernel& kernel;
  const int32_t offset;  // of the weight's codes
  const bool even_odd;   // as of a decoder
  Tasks tasks;
  const i64 pixels, pixel_bytes;
  const Scratch<OF_X> scratch;
  ExponentRange exponents;  // of x
  std::mutex mutex;         // of `exponents`
  std::atomic<bool> unsupported{false};

  GemmInt8(const Linear& linear, const Int8Kernel& kernel, int32_t offset, bool even_odd)
      : linear(linear),
        kernel(kernel),
        offset(offset),
        even_odd(even_odd),
        tasks(linear.call),
        pixels(linear.im2col.pixels),
        pixel_bytes(linear.tap_groups * kernel.x_bytes),
        scratch((pixels + 1) * pixel_bytes) {  // the last pixel is zeros
    std::memset(pixel(pixels), 0, pixel_bytes);
    if (!linear.im2col.is_matrix()) exponents.add(0);  // of the pixel of zeros
  }

  u8* pixel(i64 index) const { return scratch.data() + index * pixel_bytes; }
  const u8* zeros() const { return pixel(pixels); }

  // Returns false if a value of a pixel has no code.
  bool encode_pixel(i64 index, ExponentRange& range) {
    const LinearCall& c = linear.call;
    u8* out = pixel(index);
    for (i64 first = 0; first < c.k; first += kGroup, out += kernel.x_bytes) {
      const i64 at = index * c.k + first;
      float values[kGroup] = {};
      CodeGroup group;
      int32_t exponent;
      if (c.k - first < kGroup) get_floats(c.x, at, c.k - first, BF16, values);
      else
        for (i64 i = 0; i < kGroup; i += kWidth) store(values + i, widened(c.x, BF16, at + i));
      if (!to_codes(values, &group, &exponent, kernel.mantissa)) return false;
      range.add(exponent);
      if (even_odd) store(group.codes, to_even_odd(load256(group.codes)));
      kernel.pack_x(group, offset, out);
    }
    return true;
  }

  // Points `out`: (taps, kInt8Rows) to the pixels of up to kInt8Rows rows from `row` on, and writes the rows' positions
  // in the result. Leaves the pointers of missing rows unchanged.
  void find_pixels(i64 row, i64 n, const u8** out, i64* positions) const {
    linear.im2col.each_tap(row, n, positions, [&](i64 r, i64 count, i64 tap, i64 index, i64 step) {
      const u8* at = index < 0 ? zeros() : pixel(index);
      step *= index < 0 ? 0 : pixel_bytes;
      for (i64 i = 0; i < count; ++i, at += step) out[tap * kInt8Rows + r + i] = at;
    });
  }
};

void encode_pixels(i64 begin, i64 end, void* context) {
  GemmInt8& gemm = *static_cast<GemmInt8*>(context);
  const KeepSubnormals keep;
  ExponentRange exponents;
  for (i64 pixel = begin; pixel < end && !gemm.unsupported; ++pixel) {
    if (!gemm.encode_pixel(pixel, exponents)) gemm.unsupported = true;
  }
  const std::lock_guard<std::mutex> lock(gemm.mutex);
  gemm.exponents.add(exponents);
}

// ---- the GEMM ----

// Decodes rows [row, last) of the weight, rounded up to a multiple of kNR, to w: (kWidth rows each, taps, groups).
// Returns false if a sum with them could leave the normal numbers.
template <class Decoder>
bool decode_panels(const GemmInt8& gemm, i64 row, i64 last, u8* w) {
  const Linear& linear = gemm.linear;
  const IntegerColumns<Decoder> columns(linear.call.table);
  const ScaleRange range(columns.shift, gemm.exponents);
  const i64 groups = linear.tap_groups, taps = linear.im2col.taps;
  Strip<Decoder> strip;
  GroupColumns decoded[kStripGroups];
  for (const i64 end = row + (last - row + kNR - 1) / kNR * kNR; row < end; row += kWidth) {
    for (i64 tap = 0; tap < taps; ++tap) {
      const LinearCall c = linear.call_of(tap);
      for (i64 first = 0, count; first < groups; first += count) {
        count = std::min(kStripGroups, groups - first);
        strip.read(c, c.row_bytes / taps, row, first, count);
        for (i64 g = 0; g < count; ++g)
          columns.decode(strip.codes + g * Decoder::kBytes, strip.kBytes, decoded[g].codes);
        if (!set_powers(strip.scales, count, columns.shift, range, u8(columns.offset), decoded)) return false;
        for (i64 g = 0; g < count; ++g, w += gemm.kernel.w_bytes) gemm.kernel.pack_w(decoded[g], columns.offset, w);
      }
    }
  }
  return true;
}

// sums: (kInt8Rows, kNR) = x: (taps, kInt8Rows) pointers to pixels, times w: (kPanels, taps, groups). It sums a few
// groups at a time, because a sum of partial sums is more exact. Skips a tap if all its pixels are zeros.
inline void microkernel_int8(const GemmInt8& gemm, const u8* const* x, const u8* w, float* sums) {
  constexpr i64 n = kInt8Rows * kNR;
  const i64 taps = gemm.linear.im2col.taps, groups = gemm.linear.tap_groups, panels = taps * groups;
  alignas(64) float strip[n] = {};
  std::fill(sums, sums + n, 0);
  for (i64 tap = 0, g = 0, left = kStripGroups; tap < taps;) {
    const u8* rows[kInt8Rows];
    bool inside = false;
    for (i64 r = 0; r < kInt8Rows; ++r) {
      inside |= x[tap * kInt8Rows + r] != gemm.zeros();
      rows[r] = x[tap * kInt8Rows + r] + g * gemm.kernel.x_bytes;
    }
    const i64 count = std::min(groups - g, left);
    if (inside) gemm.kernel.multiply(rows, w, panels, count, strip);
    w += count * gemm.kernel.w_bytes;
    left -= count;
    g += count;
    if (g == groups) ++tap, g = 0;
    if (left && tap < taps) continue;
    for (i64 i = 0; i < n; ++i) sums[i] += strip[i];
    std::fill(strip, strip + n, 0);
    left = kStripGroups;
  }
}

template <class Decoder>
void run_gemm_int8(i64, i64, void* context) {
  GemmInt8& gemm = *static_cast<GemmInt8*>(context);
  const Linear& linear = gemm.linear;
  const LinearCall& c = linear.call;
  const i64 taps = linear.im2col.taps, groups = linear.groups, block = kTilesOfPanel * kInt8Rows;
  const KeepSubnormals keep;
  const i64 panel = groups * gemm.kernel.w_bytes;  // of kWidth columns
  const Scratch<OF_WEIGHT> w((c.task_columns + kNR - 1) / kNR * kPanels * panel);
  std::vector<const u8*> x(taps * block, gemm.zeros());
  alignas(64) float sums[kInt8Rows * kNR];
  i64 positions[block];
  i64 decoded = -1;
  for (Task task; !gemm.unsupported && gemm.tasks.take(task); decoded = task.first) {
    const auto [top, bottom, first, last] = task;
    if (decoded != first && !decode_panels<Decoder>(gemm, first, last, w.data())) {
      gemm.unsupported = true;
      return;
    }
    for (i64 m = top; m < bottom; m += block) {
      const i64 end = std::min(block, bottom - m);
      for (i64 r = 0; r < end; r += kInt8Rows) {
        gemm.find_pixels(m + r, std::min(kInt8Rows, end - r), x.data() + r * taps, positions + r);
      }
      for (i64 n = first; n < last; n += kNR) {
        const u8* columns = w.data() + (n - first) / kWidth * panel;
        for (i64 r = 0; r < end; r += kInt8Rows) {
          microkernel_int8(gemm, x.data() + r * taps, columns, sums);
          finish_micro_tile(linear, positions + r, std::min(kInt8Rows, end - r), n, std::min(kNR, last - n), sums);
        }
      }
    }
  }
}

template <class Decoder>
int32_t run_kernel(const Linear& linear, const Int8Kernel& kernel, ParallelFor parallel_for) {
  using Columns = IntegerColumns<Decoder>;
  GemmInt8 gemm(linear, kernel, Columns(linear.call.table).offset, Columns::kEvenOdd);
  const i64 first = std::min(kInt8Rows, gemm.pixels), grain = std::max<i64>(1, (1 << 16) / linear.call.k);
  encode_pixels(0, first, &gemm);  // if the first pixels have no codes, no thread starts
  if (!gemm.unsupported && gemm.pixels > first) {
    if (const int32_t error = parallel_for(first, gemm.pixels, grain, encode_pixels, &gemm)) return error;
  }
  if (gemm.unsupported) return kUnsupported;
  const int32_t error = parallel_for(0, gemm.tasks.count(), 1, run_gemm_int8<Decoder>, &gemm);
  return error ? error : gemm.unsupported ? kUnsupported : 0;
}

// Returns kUnsupported, and computes nothing, for other formats and values.
template <class Decoder>
int32_t gemm_int8(const Linear& linear, ParallelFor parallel_for) {
  if constexpr (IntegerColumns<Decoder>::kSupported) {
    const LinearCall& c = linear.call;
    const IntegerColumns<Decoder> columns(c.table);
    for (const Int8Kernel& kernel : kInt8Kernels) {
      if (c.dtype != BF16 || !(c.integer_isa & kernel.isa) || !kernel.fits(columns.offset, columns.most)) continue;
      const int32_t error = run_kernel<Decoder>(linear, kernel, parallel_for);
      if (error != kUnsupported || kernel.mantissa == kCodeMantissa) return error;
    }
  }
  return kUnsupported;
}

}  // namespace

#else

namespace {

template <class Decoder>
int32_t gemm_int8(const Linear&, ParallelFor) {
  return kUnsupported;
}

}  // namespace

#endif
