// conv2d_mx of few channels, as of images, where a group of 32 would be almost empty. The pixels at the taps of one row
// of the kernel are adjacent in memory, so they are multiplied as one pixel with that many more channels:
//
//     a 3 x 3 kernel on RGB    9 taps of 3 channels  ->  3 taps of 9 channels

#pragma once

#include <cmath>

#include "gemm_bf16.h"

namespace {

constexpr i64 kFewChannels = 23;  // with more, groups of 32 are at least three quarters full

bool merges_taps_of_row(const ConvolutionCall& c) { return c.linear.k <= kFewChannels && c.dilation[1] == 1; }

}  // namespace

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

// Returns the convolution of merged pixels, over rows of the image padded with zeros on both sides.
ConvolutionCall with_merged_taps(const ConvolutionCall& c) {
  ConvolutionCall merged = c;
  merged.linear.k = c.kernel[1] * c.linear.k;
  merged.size[1] = c.size[1] + 2 * c.padding[1];
  merged.pixels = c.pixels / c.size[1] * merged.size[1];
  merged.kernel[1] = 1;
  merged.padding[1] = 0;
  return merged;
}

// Copies rows of the images and pads them. A merged pixel may read one value past its last tap, and multiply it by
// zero. That needs finite values, so Inf and NaN are unsupported.
void pad_rows(i64 begin, i64 end, void* context) {
  GemmBf16& gemm = *static_cast<GemmBf16*>(context);
  const ConvolutionCall& c = *gemm.image;
  const i64 values = c.size[1] * c.linear.k, padding = c.padding[1] * c.linear.k, length = values + 2 * padding;
  const u16* x = static_cast<const u16*>(c.linear.x) + begin * values;
  u16* out = gemm.padded.data() + begin * length;
  gemm.update_min_exponent(min_exponent_of(x, (end - begin) * values));
  for (i64 row = begin; row < end; ++row, x += values, out += length) {
    u16 most = 0;
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < values; ++i) most = std::max(most, u16(x[i] & 0x7FFF));
    if (most >= 0x7F80) gemm.unsupported = true;
    std::fill(out, out + padding, u16(0));
    std::copy(x, x + values, out + padding);
    std::fill(out + padding + values, out + length, u16(0));
  }
}

// As `decode_rows`, for merged taps, of which there are few: all are decoded together.
bool decode_merged_taps(const GemmBf16& gemm, i64 row, i64 last, i64, i64, u16* w) {
  const Linear& linear = gemm.linear;
  const i64 channels = gemm.image->linear.k, wide = gemm.image->kernel[1], size = linear.tap_groups * 2 * kTileElems;
  i64 min_exponent = 2 * kBias;
  for (; row < last; row += kNR) {
    for (i64 kernel_row = 0; kernel_row < linear.im2col.taps; ++kernel_row) {
      std::fill(w, w + size, u16(0));
      LinearCall tap = linear.call_of(kernel_row);
      tap.k = channels;
      for (i64 j = 0; j < wide; ++j) {
        for (i64 q = 0; q < kNR; ++q) {
          float values[kGroup];
          decode_row(tap, std::min(row + q, tap.n - 1), false, values);
          for (i64 i = 0; i < channels; ++i) {
            if (values[i] != 0 && !std::isnormal(values[i])) return false;
            const i64 at = j * channels + i;
            w[at / kGroup * 2 * kTileElems + q * kGroup + at % kGroup] = u16(bits_of(values[i]) >> 16);
          }
        }
        tap.data += tap.row_bytes / (linear.im2col.taps * wide);
        tap.scale += tap.row_blocks / (linear.im2col.taps * wide);
      }
      min_exponent = std::min(min_exponent, min_exponent_of(w, size));
      for (const u16* end = w + size; w < end; w += kTileElems) transpose(w);
    }
  }
  return products_are_normal(gemm.min_exponent, min_exponent);
}

int32_t conv_small_channels(const ConvolutionCall& c, ParallelFor parallel_for) {
  if (!(c.linear.isa & (AMX | AVX512_BF16))) return kUnsupported;
  const ConvolutionCall merged = with_merged_taps(c);
  const Linear linear(merged.linear, &merged);
  GemmBf16 gemm(linear, decode_merged_taps);
  gemm.image = &c;
  gemm.pixel_stride = c.linear.k;
  gemm.padded.resize(merged.pixels * gemm.pixel_stride + 1);
  gemm.padded.data()[merged.pixels * gemm.pixel_stride] = 0;
  gemm.x = gemm.padded.data();
  const i64 grain = std::max<i64>(1, (1 << 16) / (c.size[1] * c.linear.k));
  const int32_t error = parallel_for(0, c.pixels / c.size[1], grain, pad_rows, &gemm);
  return error ? error : multiply(gemm, parallel_for);
}

}  // namespace

#endif
