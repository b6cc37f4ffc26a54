// The GEMM of many rows of x in bfloat16: a task decodes some rows of the weight to bfloat16, which is exact, and
// multiplies them with 32 rows of x at a time, by AMX or AVX512_BF16, with sums in fp32.
//
// Both treat subnormal numbers as zero. If a product could be subnormal, the kernel computes nothing, and the caller
// uses another kernel.

#pragma once

#include <atomic>

#include "decode_bf16.h"
#include "epilogue.h"
#include "gemm_microkernel.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

struct GemmBf16;

// Decodes rows [row, last) of the weight to panels w: (panels, groups, 2, kTileRows pairs of values, kTileRows columns,
// 2). Returns false if products with them could be subnormal, or a code is invalid.
typedef bool (*DecodeRows)(const GemmBf16& gemm, i64 row, i64 last, u16* w);

struct GemmBf16 {
  const Linear& linear;
  const DecodeRows decode;
  Tasks tasks;
  const i64 width, stride;                 // values of a tap and of a row, each padded to whole groups
  i64 pixel_stride;                        // values between pixels in memory
  const u16* x;                            // pixels
  const ConvolutionCall* image = nullptr;  // for conv_small_channels.h: the convolution before taps were merged
  Buffer<u16> padded, zeros;
  std::atomic<i64> min_exponent{2 * kBias};  // of x
  std::atomic<bool> unsupported{false};

  GemmBf16(const Linear& linear, DecodeRows decode)
      : linear(linear),
        decode(decode),
        tasks(linear.call),
        width(linear.tap_groups * kGroup),
        stride(linear.groups * kGroup),
        pixel_stride(width),
        x(static_cast<const u16*>(linear.call.x)) {
    zeros.resize(width);
  }

  void update_min_exponent(const u16* values, i64 n) {
    const i64 exponent = min_exponent_of(values, n);
    for (i64 before = min_exponent; exponent < before && !min_exponent.compare_exchange_weak(before, exponent);) {}
  }

  // Points `out`: (taps, kMR) to the pixels of `n` rows from `row` on, and writes the rows' positions in the result.
  // Leaves the pointers of missing rows unchanged.
  void find_pixels(i64 row, i64 n, const u16** out, i64* positions) const {
    linear.im2col.each_tap(row, n, positions, [&](i64 r, i64 count, i64 tap, i64 pixel, i64 apart) {
      const u16* at = pixel < 0 ? zeros.data() : x + pixel * pixel_stride;
      apart *= pixel < 0 ? 0 : pixel_stride;
      for (i64 i = 0; i < count; ++i, at += apart) out[tap * kMR + r + i] = at;
    });
  }

  // Returns these rows `stride` values apart, as AMX loads them: x itself, or a copy in `rows`, padded with zeros.
  const u16* gather(const u16* const* pixels, i64 n, u16* rows) const {
    if (linear.im2col.is_matrix() && n == kMR) return pixels[0];
    for (i64 r = 0; r < n; ++r) {
      for (i64 tap = 0; tap < linear.im2col.taps; ++tap) {
        std::memcpy(rows + r * stride + tap * width, pixels[tap * kMR + r], 2 * linear.call.k);
      }
    }
    return rows;
  }
};

// Finds the smallest exponent of pixels, and pads them with zeros to whole groups.
void scan_and_pad(i64 begin, i64 end, void* context) {
  GemmBf16& gemm = *static_cast<GemmBf16*>(context);
  const i64 k = gemm.linear.call.k;
  const u16* x = static_cast<const u16*>(gemm.linear.call.x);
  gemm.update_min_exponent(x + begin * k, (end - begin) * k);
  if (gemm.width == k) return;
  for (i64 row = begin; row < end; ++row) {
    u16* out = gemm.padded.data() + row * gemm.width;
    std::memset(std::copy(x + row * k, x + (row + 1) * k, out), 0, 2 * (gemm.width - k));
  }
}

template <class Decoder>
bool decode_rows(const GemmBf16& gemm, i64 row, i64 last, u16* w) {
  const Linear& linear = gemm.linear;
  Decoder decoder(linear.call);
  i64 min_exponent = 2 * kBias;
  bool subnormal = false;
  for (; row < last; row += kNR) {
    for (i64 tap = 0; tap < linear.im2col.taps; ++tap) {
      const LinearCall c = linear.call_of(tap);
      for (i64 g = 0; g < linear.tap_groups; g += kChunkGroups) {
        const i64 count = std::min(kChunkGroups, linear.tap_groups - g);
        subnormal |= decode_chunk(c, decoder, row, g, g + count, w);
        min_exponent = std::min(min_exponent, min_exponent_of(w, count * 2 * kTileElems));
        for (const u16* end = w + count * 2 * kTileElems; w < end; w += kTileElems) transpose(w);
      }
    }
  }
  return products_are_normal(gemm.min_exponent, min_exponent) && !subnormal && !decoder.invalid();
}

void run_gemm_bf16(i64, i64, void* context) {
  GemmBf16& gemm = *static_cast<GemmBf16*>(context);
  const LinearCall& c = gemm.linear.call;
  const i64 groups = gemm.linear.groups, panel = groups * 2 * kTileElems;
  const KeepSubnormals keep;
  const i64 panels = (c.task_columns + kNR - 1) / kNR;
  const Scratch<OF_WEIGHT> scratch(2 * panels * panel);
  u16* const w = reinterpret_cast<u16*>(scratch.data());
  std::vector<const u16*> pixels(gemm.linear.im2col.taps * kMR, gemm.x);
  i64 positions[kMR];
  Buffer<u16> gathered;
  Buffer<float> sums;
  const bool amx = c.isa & AMX;
  if (amx) gathered.resize(kMR * gemm.stride);
  sums.resize((panels + 1) * kMicroTile);
  if (amx) configure_amx();
  i64 decoded = -1;
  for (Task task; !gemm.unsupported && gemm.tasks.take(task); decoded = task.first) {
    const auto [top, bottom, first, last] = task;
    if (decoded != first && !gemm.decode(gemm, first, last, w)) gemm.unsupported = true;
    for (i64 m = top; m < bottom; m += kMR) {
      const i64 rows = std::min(kMR, bottom - m);
      gemm.find_pixels(m, rows, pixels.data(), positions);
      if (amx) {
        const u16* x = gemm.gather(pixels.data(), rows, gathered.data());
        gemm_panels_amx(x, gemm.stride, w, groups, panels, sums.data());
      }
      for (i64 p = 0; p * kNR < last - first; ++p) {
        float* micro_tile = sums.data() + p * kMicroTile;
        if (!amx) {
          microkernel_32x32_avx512(pixels.data(), rows, w + p * panel, gemm.linear.im2col.taps, c.k, micro_tile, kNR,
                                   gemm.zeros.data());
        }
        const i64 column = first + p * kNR;
        finish_micro_tile(gemm.linear, positions, rows, column, std::min(kNR, last - column), micro_tile);
      }
    }
  }
  if (amx) release_amx();
}

int32_t multiply(GemmBf16& gemm, ParallelFor parallel_for) {
  const int32_t error = parallel_for(0, gemm.tasks.count(), 1, run_gemm_bf16, &gemm);
  return error ? error : gemm.unsupported ? kUnsupported : 0;
}

template <class Decoder>
int32_t gemm_bf16(Linear& linear, ParallelFor parallel_for) {
  const i64 k = linear.call.k, pixels = linear.im2col.pixels, grain = std::max<i64>(1, (1 << 16) / k);
  GemmBf16 gemm(linear, decode_rows<Decoder>);
  if (gemm.width != k) {
    gemm.padded.resize(pixels * gemm.width);
    gemm.x = gemm.padded.data();
  }
  if (const int32_t error = parallel_for(0, pixels, grain, scan_and_pad, &gemm)) return error;
  return multiply(gemm, parallel_for);
}

}  // namespace

#endif
