// The product of many rows of bfloat16 values: a task decodes some rows of the weight to bfloat16, which is exact, and
// multiplies them with 32 rows of x at a time, in the matrix registers of AMX or by AVX512_BF16, with sums in fp32.
// Included by linear.cpp.
//
// Both take subnormal numbers for zero. Where the least values of x and of the weight are so small that a product could
// be one, nothing is computed: the caller multiplies in another way.

#pragma once

#if defined(PT2MX_TILES)

#include <atomic>

namespace {

constexpr i64 kStripSums = 16;          // groups that are summed by themselves
constexpr i64 kSquare = kPair * kPair;  // sums of a call of a kernel

// sums: (kPair, kPair) = x: kPair rows of `groups` groups, `stride` values apart, times w: (groups, 2, kSide pairs of
// values, kSide rows, 2).
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void square_in_tiles(const u16* x, i64 stride, const u16* w,
                                                                           i64 groups, float* sums) {
  const u16* below = x + kSide * stride;
  const i64 bytes = 2 * stride, row = 4 * kPair;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 g = 0; g < groups; ++g, x += kGroup, below += kGroup, w += 2 * kTile) {
    _tile_loadd(4, x, bytes);
    _tile_loadd(6, w, 64);
    _tile_loadd(5, below, bytes);
    _tile_loadd(7, w + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + kSide, row);
  _tile_stored(2, sums + kSide * kPair, row);
  _tile_stored(3, sums + kSide * kPair + kSide, row);
}

// sums: (panels, kPair, kPair), and room for one more, = x as above, times w: (panels, groups, ..). A strip of x stays
// in the first-level cache.
inline void squares_in_tiles(const u16* x, i64 stride, const u16* w, i64 groups, i64 panels, float* sums) {
  float* strip = sums + panels * kSquare;
  for (i64 g = 0; g < groups; g += kStripSums) {
    const i64 depth = std::min(kStripSums, groups - g);
    for (i64 p = 0; p < panels; ++p) {
      float* total = sums + p * kSquare;
      square_in_tiles(x + g * kGroup, stride, w + (p * groups + g) * 2 * kTile, depth, g ? strip : total);
      for (i64 i = 0; g && i < kSquare; ++i) total[i] += strip[i];
    }
  }
}

// sums: (rows, kPair) = x: (taps, kPair) pixels of `groups` groups, times w: (taps, groups, ..) as above. Rows up to a
// multiple of 8 are written.
__attribute__((target("avx512bf16"))) NOINLINE void square_in_vectors(const u16* const* x, i64 rows, const u16* w,
                                                                      i64 taps, i64 groups, float* sums) {
  constexpr int kRowsOfX = 8;
  for (i64 row = 0; row < rows; row += kRowsOfX, x += kRowsOfX, sums += kRowsOfX * kPair) {
    std::memset(sums, 0, kRowsOfX * kPair * sizeof(float));
    const u16* panel = w;
    for (i64 tap = 0, g = 0; tap < taps;) {
      __m512 sum[kRowsOfX][2] = {};
      for (i64 left = kStripSums; left && tap < taps;) {
        const u16* pixel[kRowsOfX];
        for (int r = 0; r < kRowsOfX; ++r) pixel[r] = x[tap * kPair + r] + g * kGroup;
        const i64 n = std::min(groups - g, left);
        for (i64 i = 0; i < n; ++i, panel += 2 * kTile) {
          for (i64 pair = 0; pair < kSide; ++pair) {
            const u16* values = panel + pair * kGroup;
            const __m512bh first = __m512bh(_mm512_loadu_si512(values));
            const __m512bh second = __m512bh(_mm512_loadu_si512(values + kTile));
            for (int r = 0; r < kRowsOfX; ++r) {
              const __m512bh both = __m512bh(_mm512_set1_epi32(load<int32_t>(pixel[r] + i * kGroup + 2 * pair)));
              sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, first);
              sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, second);
            }
          }
        }
        left -= n;
        g += n;
        if (g == groups) ++tap, g = 0;
      }
      for (int r = 0; r < kRowsOfX; ++r) {
        for (int h = 0; h < 2; ++h) {
          float* total = sums + r * kPair + h * kSide;
          _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum[r][h]));
        }
      }
    }
  }
}

// The exponent of the least value that is not zero, with its bias; 0 of a subnormal one.
inline i64 least_exponent(const u16* values, i64 n) {
  u16 least = 0x7FFE;
#pragma omp simd reduction(min : least)
  for (i64 i = 0; i < n; ++i) least = std::min(least, u16((values[i] & 0x7FFF) - 1));
  return (least + 1) >> 7;
}

// Whether products of values with these least exponents are normal numbers, as the values are.
inline bool is_served(i64 x, i64 w) { return x > 0 && w > 0 && x + w - 2 * kBias >= 1 - kBias; }

// A (16, 16) matrix of pairs, in place.
inline void transpose(u16* pairs) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(pairs + i * kGroup);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {  // lanes of 128 bits: of rows i, i + 4, i + 8 and i + 12
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const __m512i low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    b[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xDD);
    b[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xDD);
  }
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(pairs + i * kGroup, b[i]);
}

// As `finish`, faster for kPair sums to fp32 or bfloat16, and with the epilogue.
inline void finish_part(const Linear& linear, i64 m, i64 row, i64 n, float* y) {
  const LinearCall& c = linear.call;
  if (n < kPair || c.out_dtype == FP16) return finish(linear, m, row, n, y);
  const i64 at = m * c.n + row;
  Floats sums[2];
  for (int i = 0; i < 2; ++i) {
    sums[i] = load<Floats>(y + i * kWidth);
    if (!linear.bias.empty()) sums[i] += load<Floats>(linear.bias.data() + row + i * kWidth);
    sums[i] = rounded(sums[i] == sums[i] ? sums[i] : Floats(ints(0x7FC00000)), c.out_dtype);
  }
  if (!linear.quantizer) return store_two(c.out, c.out_dtype, at, sums[0], sums[1]);
  for (Floats& v : sums) v = rounded(activated(c.epilogue->activation, v), c.out_dtype);
  linear.quantizer->quantize(sums, 2);
  store_two(c.out, c.epilogue->out_dtype, at, sums[0], sums[1]);
}

struct Many {
  const Linear& linear;
  const i64 width, stride, across;  // values of a pixel and of a row, filled with zeros; tasks next to each other
  const u16* x;                     // pixels
  Buffer<u16> filled, zeros;
  std::atomic<i64> least{2 * kBias};  // exponent of x
  std::atomic<bool> unserved{false};

  explicit Many(const Linear& linear)
      : linear(linear),
        width(linear.tap_groups * kGroup),
        stride(linear.groups * kGroup),
        across((linear.call.n + linear.call.task_columns - 1) / linear.call.task_columns),
        x(static_cast<const u16*>(linear.call.x)) {
    zeros.resize(width);
  }

  // The pixels of `n` rows from `row` on: (taps, kPair). Those of missing rows stay as they are.
  void find(i64 row, i64 n, const u16** out) const {
    linear.windows.each_tap(row, n, [&](i64 r, i64 tap, i64 pixel) {
      out[tap * kPair + r] = pixel < 0 ? zeros.data() : x + pixel * width;
    });
  }

  // The same rows, `stride` values apart: where they are, or in `rest`.
  const u16* gather(const u16* const* pixels, i64 n, u16* rest) const {
    if (linear.windows.are_rows() && n == kPair) return pixels[0];
    for (i64 r = 0; r < n; ++r) {
      for (i64 tap = 0; tap < linear.windows.taps; ++tap) {
        std::memcpy(rest + r * stride + tap * width, pixels[tap * kPair + r], 2 * width);
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
  const i64 own = least_exponent(x + begin * k, (end - begin) * k);
  for (i64 least = many.least; own < least && !many.least.compare_exchange_weak(least, own);) {}
  if (many.width == k) return;
  for (i64 row = begin; row < end; ++row) {
    u16* out = many.filled.data() + row * many.width;
    std::memset(std::copy(x + row * k, x + (row + 1) * k, out), 0, 2 * (many.width - k));
  }
}

// Rows [row, last) of the weight, decoded: w (pairs of 16 rows, groups, 2, kSide pairs of values, kSide rows, 2).
// Returns whether products with them are served.
template <class Decoder>
bool decode_rows(const Linear& linear, i64 row, i64 last, i64 least_of_x, u16* w) {
  Decoder decoder(linear.call);
  i64 least = 2 * kBias;
  for (; row < last; row += kPair) {
    for (i64 tap = 0; tap < linear.windows.taps; ++tap) {
      const LinearCall c = linear.call_of(tap);
      for (i64 g = 0; g < linear.tap_groups; g += kDepth) {
        const i64 depth = std::min(kDepth, linear.tap_groups - g);
        decode_chunk(c, decoder, row, g, g + depth, w);
        least = std::min(least, least_exponent(w, depth * 2 * kTile));
        for (const u16* end = w + depth * 2 * kTile; w < end; w += kTile) transpose(w);
      }
    }
  }
  return is_served(least_of_x, least) && !decoder.invalid();
}

template <class Decoder>
void run_many(i64 begin, i64 end, void* context) {
  Many& many = *static_cast<Many*>(context);
  const LinearCall& c = many.linear.call;
  const i64 groups = many.linear.groups, panel = groups * 2 * kTile;
  const KeepSubnormals keep;
  const i64 panels = (c.task_columns + kPair - 1) / kPair;
  const Scratch<OF_WEIGHT> scratch(2 * panels * panel);
  u16* const w = reinterpret_cast<u16*>(scratch.data());
  std::vector<const u16*> pixels(many.linear.windows.taps * kPair, many.x);
  Buffer<u16> rest;
  Buffer<float> sums;
  const bool tiles = c.units & AMX;
  if (tiles) rest.resize(kPair * many.stride);
  sums.resize((panels + 1) * kSquare);
  if (tiles) configure();
  for (i64 task = begin; task < end && !many.unserved; ++task) {
    const i64 first = task % many.across * c.task_columns, last = std::min(first + c.task_columns, c.n);
    const i64 bottom = std::min((task / many.across + 1) * c.task_rows, c.m);
    if (!decode_rows<Decoder>(many.linear, first, last, many.least, w)) many.unserved = true;
    for (i64 m = task / many.across * c.task_rows; m < bottom; m += kPair) {
      const i64 rows = std::min(kPair, bottom - m);
      many.find(m, rows, pixels.data());
      if (tiles) {
        squares_in_tiles(many.gather(pixels.data(), rows, rest.data()), many.stride, w, groups, panels, sums.data());
      } else {
        for (i64 p = 0; p < panels; ++p) {
          square_in_vectors(pixels.data(), rows, w + p * panel, many.linear.windows.taps, many.linear.tap_groups,
                            sums.data() + p * kSquare);
        }
      }
      for (i64 r = 0; r < rows; ++r) {
        for (i64 n = first; n < last; n += kPair) {
          finish_part(many.linear, m + r, n, std::min(kPair, last - n), sums.data() + (n - first) * kPair + r * kPair);
        }
      }
    }
  }
  if (tiles) release();
}

template <class Decoder>
int32_t multiply_many_rows(Linear& linear, ParallelFor parallel_for) {
  const LinearCall& c = linear.call;
  Many many(linear);
  const i64 pixels = linear.windows.pixels, grain = std::max<i64>(1, (1 << 16) / c.k);
  if (many.width != c.k) {
    many.filled.resize(pixels * many.width);
    many.x = many.filled.data();
  }
  if (const int32_t error = parallel_for(0, pixels, grain, look_through, &many)) return error;
  const i64 tasks = many.across * ((c.m + c.task_rows - 1) / c.task_rows);
  const int32_t error = parallel_for(0, tasks, 1, run_many<Decoder>, &many);
  return error ? error : many.unserved ? kUnserved : 0;
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
