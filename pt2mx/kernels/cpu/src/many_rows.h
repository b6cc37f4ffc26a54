// The product of many rows of bfloat16 values: a task decodes some rows of the weight to bfloat16, which is exact, and
// multiplies them with 32 rows of x at a time, in the matrix registers of AMX or by AVX512_BF16, with sums in fp32.
// Included by linear.cpp.
//
// Both take subnormal numbers for zero. Where the least values of x and of the weight are so small that a product could
// be one, nothing is computed: the caller multiplies in another way.

#pragma once

#if defined(PT2MX_TILES)

#include "tasks.h"

namespace {

struct Many;

// Decodes rows [row, last) of the weight: w (pairs of 16 rows, groups, 2, kSide pairs of values, kSide rows, 2).
// Returns whether products with them are served.
typedef bool (*DecodeRows)(const Many& many, i64 row, i64 last, u16* w);

struct Many {
  const Linear& linear;
  const DecodeRows decode;
  Tasks tasks;
  const i64 width, stride;                 // values of a tap and of a row, filled with zeros
  i64 step;                                // values of a pixel in memory
  const u16* x;                            // pixels
  const ConvolutionCall* image = nullptr;  // of lines.h, what is convolved
  Buffer<u16> filled, zeros;
  std::atomic<i64> least{2 * kBias};  // exponent of x
  std::atomic<bool> unserved{false};

  Many(const Linear& linear, DecodeRows decode)
      : linear(linear),
        decode(decode),
        tasks(linear.call),
        width(linear.tap_groups * kGroup),
        stride(linear.groups * kGroup),
        step(width),
        x(static_cast<const u16*>(linear.call.x)) {
    zeros.resize(width);
  }

  void look_at(const u16* values, i64 n) {
    const i64 own = least_exponent(values, n);
    for (i64 before = least; own < before && !least.compare_exchange_weak(before, own);) {}
  }

  // The pixels of `n` rows from `row` on: (taps, kPair), and their places in the result. Those of missing rows stay as
  // they are.
  void find(i64 row, i64 n, const u16** out, i64* places) const {
    linear.windows.each_tap(row, n, places, [&](i64 r, i64 count, i64 tap, i64 pixel, i64 apart) {
      const u16* at = pixel < 0 ? zeros.data() : x + pixel * step;
      apart *= pixel < 0 ? 0 : step;
      for (i64 i = 0; i < count; ++i, at += apart) out[tap * kPair + r + i] = at;
    });
  }

  // The same rows, `stride` values apart: where they are, or in `rest`, whose other values are zero.
  const u16* gather(const u16* const* pixels, i64 n, u16* rest) const {
    if (linear.windows.are_rows() && n == kPair) return pixels[0];
    for (i64 r = 0; r < n; ++r) {
      for (i64 tap = 0; tap < linear.windows.taps; ++tap) {
        std::memcpy(rest + r * stride + tap * width, pixels[tap * kPair + r], 2 * linear.call.k);
      }
    }
    return rest;
  }
};

// Pixels are looked through for their least value, and filled with zeros up to whole groups.
void look_through(i64 begin, i64 end, void* context) {
  Many& many = *static_cast<Many*>(context);
  const i64 k = many.linear.call.k;
  const u16* x = static_cast<const u16*>(many.linear.call.x);
  many.look_at(x + begin * k, (end - begin) * k);
  if (many.width == k) return;
  for (i64 row = begin; row < end; ++row) {
    u16* out = many.filled.data() + row * many.width;
    std::memset(std::copy(x + row * k, x + (row + 1) * k, out), 0, 2 * (many.width - k));
  }
}

template <class Decoder>
bool decode_rows(const Many& many, i64 row, i64 last, u16* w) {
  const Linear& linear = many.linear;
  Decoder decoder(linear.call);
  i64 least = 2 * kBias;
  bool subnormal = false;
  for (; row < last; row += kPair) {
    for (i64 tap = 0; tap < linear.windows.taps; ++tap) {
      const LinearCall c = linear.call_of(tap);
      for (i64 g = 0; g < linear.tap_groups; g += kDepth) {
        const i64 depth = std::min(kDepth, linear.tap_groups - g);
        subnormal |= decode_chunk(c, decoder, row, g, g + depth, w);
        least = std::min(least, least_exponent(w, depth * 2 * kTile));
        for (const u16* end = w + depth * 2 * kTile; w < end; w += kTile) transpose(w);
      }
    }
  }
  return is_served(many.least, least) && !subnormal && !decoder.invalid();
}

void run_many(i64, i64, void* context) {
  Many& many = *static_cast<Many*>(context);
  const LinearCall& c = many.linear.call;
  const i64 groups = many.linear.groups, panel = groups * 2 * kTile;
  const KeepSubnormals keep;
  const i64 panels = (c.task_columns + kPair - 1) / kPair;
  const Scratch<OF_WEIGHT> scratch(2 * panels * panel);
  u16* const w = reinterpret_cast<u16*>(scratch.data());
  std::vector<const u16*> pixels(many.linear.windows.taps * kPair, many.x);
  i64 places[kPair];
  Buffer<u16> rest;
  Buffer<float> sums;
  const bool tiles = c.units & AMX;
  if (tiles) rest.resize(kPair * many.stride);
  sums.resize((panels + 1) * kSquare);
  if (tiles) configure();
  i64 decoded = -1;
  for (Task task; !many.unserved && many.tasks.take(task); decoded = task.first) {
    const auto [top, bottom, first, last] = task;
    if (decoded != first && !many.decode(many, first, last, w)) many.unserved = true;
    for (i64 m = top; m < bottom; m += kPair) {
      const i64 rows = std::min(kPair, bottom - m);
      many.find(m, rows, pixels.data(), places);
      if (tiles) {
        squares_in_tiles(many.gather(pixels.data(), rows, rest.data()), many.stride, w, groups, panels, sums.data());
      }
      for (i64 p = 0; p * kPair < last - first; ++p) {
        float* square = sums.data() + p * kSquare;
        if (!tiles) {
          square_in_vectors(pixels.data(), rows, w + p * panel, many.linear.windows.taps, c.k, square, kPair,
                            many.zeros.data());
        }
        const i64 column = first + p * kPair;
        finish_square(many.linear, places, rows, column, std::min(kPair, last - column), square);
      }
    }
  }
  if (tiles) release();
}

int32_t multiply(Many& many, ParallelFor parallel_for) {
  const int32_t error = parallel_for(0, many.tasks.count(), 1, run_many, &many);
  return error ? error : many.unserved ? kUnserved : 0;
}

template <class Decoder>
int32_t multiply_many_rows(Linear& linear, ParallelFor parallel_for) {
  const i64 k = linear.call.k, pixels = linear.windows.pixels, grain = std::max<i64>(1, (1 << 16) / k);
  Many many(linear, decode_rows<Decoder>);
  if (many.width != k) {
    many.filled.resize(pixels * many.width);
    many.x = many.filled.data();
  }
  if (const int32_t error = parallel_for(0, pixels, grain, look_through, &many)) return error;
  return multiply(many, parallel_for);
}

}  // namespace

#else

namespace {
template <class Decoder>
int32_t multiply_many_rows(Linear&, ParallelFor) {
  return kUnserved;
}
}  // namespace

#endif
