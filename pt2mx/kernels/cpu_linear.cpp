// linear_mx: x times a packed weight, whose codes are decoded in registers; built and called by cpu_linear.py.
//
// Some rows of the weight go together with some of x: a group of codes of each is decoded (cpu_decode.h) and multiplied
// with all those rows of x, in fp32. Every sum is made in one thread and in one order.

#include <type_traits>
#include <vector>

#include "cpu_decode.h"

namespace {

constexpr int kRows = kWidth == 16 ? 4 : 2;  // of the weight that go together
constexpr i64 kChunk = 128;                  // groups whose factors are converted at a time
constexpr i64 kAhead = 1024;                  // bytes of a row that are fetched before their turn
constexpr i64 kGrain = 1 << 18;              // products that are worth another thread

struct Linear {
  const LinearCall& call;
  const i64 groups;           // of a row, the last one perhaps not whole
  std::vector<float> x;       // (m up to a multiple of 4, groups * kGroup) in the order of the decoder
  std::vector<float> bias;    // (n), or empty

  explicit Linear(const LinearCall& c) : call(c), groups((c.k + kGroup - 1) / kGroup) {}
};

// `n` values of `from`, from the value `first` on, as fp32.
void to_floats(const void* from, i64 first, i64 n, int32_t dtype, float* out) {
  if (dtype == FP32) std::memcpy(out, static_cast<const float*>(from) + first, 4 * n);
  else widen(static_cast<const u16*>(from) + first, n, dtype, out);
}

void prepare(Linear& linear, bool pairs) {
  const LinearCall& c = linear.call;
  const i64 stride = linear.groups * kGroup, rows = (c.m + 3) / 4 * 4;
  linear.x.assign(rows * stride, 0.0f);
  std::vector<float> row(stride);
  for (i64 m = 0; m < c.m; ++m) {
    to_floats(c.x, m * c.k, c.k, c.dtype, row.data());
    float* out = linear.x.data() + m * stride;
    for (i64 first = 0; first < stride; first += kGroup) {
      for (i64 i = 0; i < kGroup; ++i) out[first + i] = row[first + place(pairs, i)];
    }
  }
  if (c.bias) {
    linear.bias.resize(c.n);
    to_floats(c.bias, 0, c.n, c.dtype, linear.bias.data());
  }
}

inline float sum_of(Floats v) {
  float lanes[kWidth];
  store(lanes, v);
  for (i64 half = kWidth / 2; half; half /= 2) {
    for (i64 i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// y: (n) to the output, from its value `at` on, in x's dtype.
void put(const LinearCall& c, i64 at, i64 n, float* y) {
  for (i64 i = 0; i < n; ++i) y[i] = y[i] == y[i] ? y[i] : from_bits(0x7FC00000);  // as narrow_bfloat needs it
  if (c.dtype == FP32) std::memcpy(static_cast<float*>(c.out) + at, y, 4 * n);
  else narrow(y, n, c.dtype, static_cast<u16*>(c.out) + at);
}

// sums += groups of the weight's rows `data` times `R` rows of x
template <class Decoder, int R>
inline void multiply(Decoder& decoder, const u8* const* data, const Factor (*factors)[kChunk], const float* x,
                     i64 stride, i64 groups, Floats (*sums)[R]) {
  Floats sum[kRows][R];
  std::memcpy(sum, sums, sizeof sum);
  for (i64 g = 0; g < groups; ++g, x += kGroup) {
    Floats w[kRows][kVectors];
    for (int q = 0; q < kRows; ++q) {
      decoder.decode(data[q] + g * Decoder::kBytes, factors[q][g], w[q]);
      __builtin_prefetch(data[q] + g * Decoder::kBytes + kAhead);
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int r = 0; r < R; ++r) {
        const Floats values = load<Floats>(x + r * stride + v * kWidth);
        for (int q = 0; q < kRows; ++q) sum[q][r] = fma(w[q][v], values, sum[q][r]);
      }
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

// The rows of the weight from `row` on, times all of x. Returns whether there was a code that has to be looked up.
template <class Decoder, int R>
bool run_rows(const Linear& linear, i64 row, const float* decoded) {
  const LinearCall& c = linear.call;
  const i64 stride = linear.groups * kGroup, whole = decoded ? linear.groups : c.k / kGroup;
  Decoder decoder(c);
  Factor factors[kRows][kChunk];
  u8 rest[kRows][Decoder::kBytes] = {};  // the last group, filled with zeros
  const u8 *data[kRows], *scale[kRows];
  for (int q = 0; q < kRows; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    data[q] = decoded ? reinterpret_cast<const u8*>(decoded + q * stride) : c.data + at * c.row_bytes;
    scale[q] = c.scale + at * c.row_blocks;
    if (whole == linear.groups) continue;
    std::memcpy(rest[q], data[q] + whole * Decoder::kBytes, c.row_bytes - whole * Decoder::kBytes);
    const i64 bits = c.k % kGroup * c.bits;  // what a byte holds beyond them is no code
    if (bits % 8) rest[q][bits / 8] &= (1 << bits % 8) - 1;
  }
  for (i64 m = 0; m < c.m; m += R) {
    Floats sums[kRows][R] = {};
    const float* x = linear.x.data() + m * stride;
    for (i64 g = 0; g < linear.groups; g += kChunk) {
      const i64 end = std::min(g + kChunk, linear.groups), full = std::min(end, whole);
      const u8* here[kRows];
      for (int q = 0; q < kRows; ++q) {
        here[q] = data[q] + g * Decoder::kBytes;
        for (i64 i = g; i < end && !decoded;) {
          const i64 b = i * kGroup / c.block;
          const Factor factor(scale[q][b], Decoder::kShift);
          for (const i64 last = std::min((b + 1) * (c.block / kGroup), end); i < last; ++i) factors[q][i - g] = factor;
        }
      }
      multiply<Decoder, R>(decoder, here, factors, x + g * kGroup, stride, full - g, sums);
      if (full == end) continue;
      for (int q = 0; q < kRows; ++q) {
        here[q] = rest[q];
        factors[q][0] = factors[q][full - g];
      }
      multiply<Decoder, R>(decoder, here, factors, x + full * kGroup, stride, 1, sums);
    }
    if (decoder.invalid()) return true;
    const i64 rows = std::min<i64>(kRows, c.n - row);
    for (i64 r = 0; r < std::min<i64>(R, c.m - m); ++r) {
      float y[kRows];
      for (i64 q = 0; q < rows; ++q) y[q] = sum_of(sums[q][r]) + (linear.bias.empty() ? 0.0f : linear.bias[row + q]);
      put(c, (m + r) * c.n + row, rows, y);
    }
  }
  return false;
}

template <class Decoder, int R>
void run(i64 begin, i64 end, void* context) {
  const Linear& linear = *static_cast<const Linear*>(context);
  const KeepSubnormals keep;
  std::vector<float> decoded;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 row = tile * kRows;
    if (!std::is_same<Decoder, Decoded>::value && !run_rows<Decoder, R>(linear, row, nullptr)) continue;
    const i64 stride = linear.groups * kGroup;
    decoded.resize(kRows * stride);
    for (i64 q = 0; q < kRows; ++q) {
      decode_row(linear.call, std::min(row + q, linear.call.n - 1), Decoder::kPairs, decoded.data() + q * stride);
    }
    run_rows<Decoded, R>(linear, row, decoded.data());
  }
}

}  // namespace

extern "C" int32_t pt2mx_linear(const LinearCall* call, ParallelFor parallel_for) {
  Linear linear(*call);
  int32_t error = 0;
  with_decoder(call->format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    prepare(linear, Decoder::kPairs);
    const i64 tiles = (call->n + kRows - 1) / kRows;
    const i64 grain = std::max<i64>(1, kGrain / (kRows * call->m * call->k));
    error = parallel_for(0, tiles, grain, call->m == 1 ? run<Decoder, 1> : run<Decoder, 4>, &linear);
  });
  return error;
}
