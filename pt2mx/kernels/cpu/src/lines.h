// Convolutions of few channels, as of images: the pixels at the taps of one line of the kernel lie next to each other
// in memory, and are multiplied as one pixel that is as long. Included by linear.cpp.

#pragma once

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kFewChannels = 23;  // of more, groups of 32 are at least three quarters full

bool is_of_lines(const ConvolutionCall& c) { return c.linear.k <= kFewChannels && c.dilation[1] == 1; }

// The convolution of such pixels, in lines that are filled with zeros on both sides.
ConvolutionCall in_lines(const ConvolutionCall& c) {
  ConvolutionCall lines = c;
  lines.linear.k = c.kernel[1] * c.linear.k;
  lines.size[1] = c.size[1] + 2 * c.padding[1];
  lines.pixels = c.pixels / c.size[1] * lines.size[1];
  lines.kernel[1] = 1;
  lines.padding[1] = 0;
  return lines;
}

// Lines of all images. Behind the last value of a tap another may be read, times zero: none is served with Inf or NaN.
void fill_lines(i64 begin, i64 end, void* context) {
  Many& many = *static_cast<Many*>(context);
  const ConvolutionCall& c = *many.image;
  const i64 values = c.size[1] * c.linear.k, beside = c.padding[1] * c.linear.k, length = values + 2 * beside;
  const u16* x = static_cast<const u16*>(c.linear.x) + begin * values;
  u16* out = many.filled.data() + begin * length;
  many.look_at(x, (end - begin) * values);
  for (i64 line = begin; line < end; ++line, x += values, out += length) {
    u16 most = 0;
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < values; ++i) most = std::max(most, u16(x[i] & 0x7FFF));
    if (most >= 0x7F80) many.unserved = true;
    std::fill(out, out + beside, u16(0));
    std::copy(x, x + values, out + beside);
    std::fill(out + beside + values, out + length, u16(0));
  }
}

// As `decode_rows`.
bool decode_lines(const Many& many, i64 row, i64 last, u16* w) {
  const Linear& linear = many.linear;
  const i64 channels = many.image->linear.k, wide = many.image->kernel[1], size = linear.tap_groups * 2 * kTile;
  i64 least = 2 * kBias;
  for (; row < last; row += kPair) {
    for (i64 line = 0; line < linear.windows.taps; ++line) {
      std::fill(w, w + size, u16(0));
      LinearCall tap = linear.call_of(line);
      tap.k = channels;
      for (i64 j = 0; j < wide; ++j) {
        for (i64 q = 0; q < kPair; ++q) {
          float values[kGroup];
          decode_row(tap, std::min(row + q, tap.n - 1), false, values);
          for (i64 i = 0; i < channels; ++i) {
            if (values[i] != 0 && !std::isnormal(values[i])) return false;
            const i64 at = j * channels + i;
            w[at / kGroup * 2 * kTile + q * kGroup + at % kGroup] = u16(bits_of(values[i]) >> 16);
          }
        }
        tap.data += tap.row_bytes / (linear.windows.taps * wide);
        tap.scale += tap.row_blocks / (linear.windows.taps * wide);
      }
      least = std::min(least, least_exponent(w, size));
      for (const u16* end = w + size; w < end; w += kTile) transpose(w);
    }
  }
  return is_served(many.least, least);
}

int32_t multiply_lines(const ConvolutionCall& c, ParallelFor parallel_for) {
  if (!(c.linear.units & (AMX | AVX512_BF16))) return kUnserved;
  const ConvolutionCall lines = in_lines(c);
  const Linear linear(lines.linear, &lines);
  Many many(linear, decode_lines);
  many.image = &c;
  many.step = c.linear.k;
  many.filled.resize(lines.pixels * many.step + 1);
  many.filled.data()[lines.pixels * many.step] = 0;
  many.x = many.filled.data();
  const i64 grain = std::max<i64>(1, (1 << 16) / (c.size[1] * c.linear.k));
  const int32_t error = parallel_for(0, c.pixels / c.size[1], grain, fill_lines, &many);
  return error ? error : multiply(many, parallel_for);
}

}  // namespace

#else

namespace {
bool is_of_lines(const ConvolutionCall&) { return false; }
int32_t multiply_lines(const ConvolutionCall&, ParallelFor) { return kUnserved; }
}  // namespace

#endif
