// linear_mx: x times a packed weight, whose codes are decoded in registers; built and called by ../linear.py.
//
// Some rows of the weight go together with some of x: a group of codes of each is decoded (decode.h) and multiplied
// with all those rows of x, in fp32. Every sum is made in one thread and in one order.

#include <optional>
#include <type_traits>

#include "activation.h"
#include "buffer.h"
#include "decode.h"
#include "in_registers.h"
#include "rotate.h"
#include "squares.h"
#include "windows.h"

namespace {

constexpr int kRows = kWidth == 16 ? 4 : 2;  // of the weight that go together
constexpr i64 kStrip = 32;                   // groups that are summed by themselves: sums of sums are more exact
constexpr i64 kChunk = 128;                  // groups whose factors are converted at a time
constexpr i64 kGrain = 1 << 18;              // products that are worth another thread

// `n` values of `from`, from the value `first` on, as fp32.
void to_floats(const void* from, i64 first, i64 n, int32_t dtype, float* out) {
  if (dtype == FP32) std::memcpy(out, static_cast<const float*>(from) + first, 4 * n);
  else widen(static_cast<const u16*>(from) + first, n, dtype, out);
}

struct Linear {
  const LinearCall& call;
  const Windows windows;
  const i64 tap_groups;                  // of a tap, the last one perhaps not whole
  const i64 groups;                      // of a row
  Buffer<float> x;                       // (m up to a multiple of 4, groups * kGroup) in the order of the decoder
  std::vector<float> bias;               // (n), or empty
  std::optional<InRegisters> quantizer;  // of the epilogue

  explicit Linear(const LinearCall& c, const ConvolutionCall* convolution = nullptr)
      : call(c), windows(c, convolution), tap_groups((c.k + kGroup - 1) / kGroup), groups(windows.taps * tap_groups) {
    if (c.epilogue) quantizer.emplace(*c.epilogue->spec, c.epilogue->out_dtype);
    if (!c.bias) return;
    bias.resize(c.n);
    to_floats(c.bias, 0, c.n, c.out_dtype, bias.data());
  }

  // Of one tap: its part of the weight's rows.
  LinearCall call_of(i64 tap) const {
    LinearCall c = call;
    c.data += tap * (c.row_bytes / windows.taps);
    c.scale += tap * (c.row_blocks / windows.taps);
    return c;
  }
};

void prepare(Linear& linear, bool pairs) {
  const LinearCall& c = linear.call;
  const i64 stride = linear.groups * kGroup, rows = (c.m + 3) / 4 * 4;
  linear.x.resize(rows * stride);
  std::vector<float> row(stride);
  for (i64 m = 0; m < c.m; ++m) {
    to_floats(c.x, m * c.k, c.k, c.dtype, row.data());
    float* out = linear.x.data() + m * stride;
    for (i64 first = 0; first < stride; first += kGroup) {
      for (i64 i = 0; i < kGroup; ++i) out[first + i] = row[first + place(pairs, i)];
    }
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

// y: (n) to the output, from its value `at` on.
void put(const LinearCall& c, i64 at, i64 n, float* y) {
  for (i64 i = 0; i < n; ++i) y[i] = y[i] == y[i] ? y[i] : from_bits(0x7FC00000);  // as narrow_bfloat needs it
  if (c.out_dtype == FP32) std::memcpy(static_cast<float*>(c.out) + at, y, 4 * n);
  else narrow(y, n, c.out_dtype, static_cast<u16*>(c.out) + at);
}

// y: (n) sums to the output, from its value (m, row) on.
void finish(const Linear& linear, i64 m, i64 row, i64 n, float* y) {
  if (!linear.bias.empty()) {
    for (i64 i = 0; i < n; ++i) y[i] += linear.bias[row + i];
  }
  put(linear.call, m * linear.call.n + row, n, y);
}

// The codes of a row's last group of `kValues`, which is not whole, filled with zeros.
template <class Decoder, i64 kValues = kGroup>
const u8* last_group(const LinearCall& c, i64 row, u8* out) {
  const i64 begin = c.k / kValues * Decoder::kBytes, bits = c.k % kValues * c.bits;
  std::memset(out, 0, Decoder::kBytes);
  std::memcpy(out, c.data + row * c.row_bytes + begin, (bits + 7) / 8);
  if (bits % 8) out[bits / 8] &= (1 << bits % 8) - 1;  // what bytes hold beyond the last code is none
  return out;
}

// The scale of each of the groups [begin, end), `per_block` of them a block of `scale`: where it is, or in `expanded`.
inline const u8* scales_of_groups(const u8* scale, i64 per_block, i64 begin, i64 end, u8* expanded) {
  if (per_block == 1) return scale + begin;
  for (i64 g = begin; g < end; ++g) expanded[g - begin] = scale[g / per_block];
  return expanded;
}

// The factors of some groups of a row.
struct Scales {
  float one[kChunk];
  TwoFactors two[kChunk];
  bool ordinary;  // one factor is enough, and gives no subnormal values: no decoder's are less than 2**-24

  // Of the groups [begin, end), `per_block` of them a block of `scale`.
  void set(const u8* scale, i64 per_block, i64 begin, i64 end, int32_t shift) {
    u8 expanded[kChunk];
    const u8* bytes = scales_of_groups(scale, per_block, begin, end, expanded);
    u8 least = 255, most = 0;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (i64 i = 0; i < end - begin; ++i) {
      one[i] = from_bits((bytes[i] + shift) << 23);
      least = std::min(least, bytes[i]);
      most = std::max(most, bytes[i]);
    }
    ordinary = least + shift > 24 && most + std::max(shift, 0) < 255;
  }

  // The factors in two steps, where not all that go together are ordinary.
  void split(const u8* scale, i64 per_block, i64 begin, i64 end, int32_t shift) {
    for (i64 g = begin; g < end; ++g) two[g - begin] = factors_of(scale[g / per_block], shift);
  }
};

// sums += groups of the weight's rows `data` times `R` rows of x. `ahead`: where the next such rows are, which are
// fetched meanwhile.
template <class Decoder, int R, class F>
NOINLINE void multiply(Decoder& decoder, const u8* const* data, i64 ahead, const F* const* factors, const float* x,
                       i64 stride, i64 groups, Floats (*sums)[R]) {
  for (i64 begin = 0; begin < groups; begin += kStrip) {
    Floats sum[kRows][R] = {};
    const i64 end = std::min(begin + kStrip, groups);
    for (i64 g = begin; g < end; ++g, x += kGroup) {
      Floats w[kRows][kVectors];
      for (int q = 0; q < kRows; ++q) {
        const u8* codes = data[q] + g * Decoder::kBytes;
        decoder.decode(codes, factors[q][g], w[q]);
        __builtin_prefetch(codes + ahead);
      }
      for (int v = 0; v < kVectors; ++v) {
        for (int r = 0; r < R; ++r) {
          const Floats values = load<Floats>(x + r * stride + v * kWidth);
          for (int q = 0; q < kRows; ++q) sum[q][r] = fma(w[q][v], values, sum[q][r]);
        }
      }
    }
    for (int q = 0; q < kRows; ++q) {
      for (int r = 0; r < R; ++r) sums[q][r] += sum[q][r];
    }
  }
}

// The weight's rows that go together, from one of them on.
template <class Decoder>
class Rows {
 public:
  // decoded: what decode_row gave of them, or null
  Rows(const Linear& linear, i64 row, const float* decoded) : linear_(linear), row_(row), decoder_(linear.call) {
    const LinearCall& c = linear.call;
    whole_ = decoded ? linear.groups : c.k / kGroup;
    per_block_ = decoded ? linear.groups : c.block / kGroup;
    ahead_ = decoded ? 0 : kRows * c.row_bytes;
    for (int q = 0; q < kRows; ++q) {
      const i64 at = std::min(row + q, c.n - 1);
      data_[q] =
          decoded ? reinterpret_cast<const u8*>(decoded + q * linear.groups * kGroup) : c.data + at * c.row_bytes;
      scale_[q] = c.scale + at * c.row_blocks;
      if (whole_ < linear.groups) last_group<Decoder>(c, at, rest_[q]);
    }
  }

  // Times all of x, `R` rows at a time. Returns whether there was a code that has to be looked up.
  template <int R>
  bool times_x() {
    const LinearCall& c = linear_.call;
    const i64 stride = linear_.groups * kGroup, rows = std::min<i64>(kRows, c.n - row_);
    for (i64 m = 0; m < c.m; m += R) {
      Floats sums[kRows][R] = {};
      add<R>(linear_.x.data() + m * stride, stride, sums);
      if (decoder_.invalid()) return true;
      for (i64 r = 0; r < std::min<i64>(R, c.m - m); ++r) {
        float y[kRows];
        for (i64 q = 0; q < rows; ++q) y[q] = sum_of(sums[q][r]);
        finish(linear_, m + r, row_, rows, y);
      }
    }
    return false;
  }

 private:
  template <int R>
  void add(const float* x, i64 stride, Floats (*sums)[R]) {
    for (i64 g = 0; g < linear_.groups; g += kChunk) {
      const i64 end = std::min(g + kChunk, linear_.groups), full = std::min(end, whole_);
      Scales scales[kRows];
      const float* one[kRows];
      const TwoFactors* two[kRows];
      const u8* data[kRows];
      bool ordinary = true;
      for (int q = 0; q < kRows; ++q) {
        scales[q].set(scale_[q], per_block_, g, end, Decoder::kShift);
        ordinary &= scales[q].ordinary;
        data[q] = data_[q] + g * Decoder::kBytes;
        one[q] = scales[q].one;
        two[q] = scales[q].two;
      }
      const auto both = [&](const auto** factors) {
        multiply<Decoder, R>(decoder_, data, ahead_, factors, x + g * kGroup, stride, full - g, sums);
        if (full == end) return;
        for (int q = 0; q < kRows; ++q) {
          data[q] = rest_[q];
          factors[q] += full - g;
        }
        multiply<Decoder, R>(decoder_, data, 0, factors, x + full * kGroup, stride, 1, sums);
      };
      if (ordinary) {
        both(one);
        continue;
      }
      for (int q = 0; q < kRows; ++q) scales[q].split(scale_[q], per_block_, g, end, Decoder::kShift);
      both(two);
    }
  }

  const Linear& linear_;
  const i64 row_;
  Decoder decoder_;
  i64 whole_, per_block_, ahead_;
  const u8 *data_[kRows], *scale_[kRows];
  u8 rest_[kRows][Decoder::kBytes];  // the last group, filled with zeros
};

template <class Decoder, int R>
void run(i64 begin, i64 end, void* context) {
  const Linear& linear = *static_cast<const Linear*>(context);
  const KeepSubnormals keep;
  Buffer<float> decoded;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 row = tile * kRows;
    if (!std::is_same<Decoder, Decoded>::value && !Rows<Decoder>(linear, row, nullptr).template times_x<R>()) {
      continue;
    }
    const i64 stride = linear.groups * kGroup;
    decoded.resize(kRows * stride);
    for (i64 q = 0; q < kRows; ++q) {
      decode_row(linear.call, std::min(row + q, linear.call.n - 1), Decoder::kPairs, decoded.data() + q * stride);
    }
    Rows<Decoded>(linear, row, decoded.data()).template times_x<R>();
  }
}

}  // namespace

#include "avx512_bf16.h"
#include "amx.h"
#include "epilogue.h"
#include "many_rows.h"
#include "lines.h"
#include "vnni.h"

namespace {

// Whether there is no epilogue, or the kernels for many rows can do it: a block is what they finish at a time.
bool can_finish(const LinearCall& c) {
  if (!c.epilogue) return true;
  const Epilogue& e = *c.epilogue;
  return c.units && c.m > kFewRows && c.out_dtype != FP16 && e.block == kGroup && c.n % kGroup == 0 &&
         e.spec->bits <= 8 && InRegisters::serves(*e.spec, e.block, c.n);
}

// On what serves of the call's units; `many`: rows, for which all of these do.
template <class Decoder>
int32_t multiply_on_units(Linear& linear, bool many, ParallelFor parallel_for) {
  const int32_t units = linear.call.units;
  int32_t error = kUnserved;
  if (~units & AMX && units & AVX512_VNNI) error = multiply_in_codes<Decoder>(linear, parallel_for);
  if (error != kUnserved || !(units & (many ? AMX | AVX512_BF16 : AMX))) return error;
  return many ? multiply_many_rows<Decoder>(linear, parallel_for) : multiply_in_tiles<Decoder>(linear, parallel_for);
}

}  // namespace

extern "C" {

int32_t pt2mx_has_tiles() { return has_tiles(); }

int32_t pt2mx_units(int32_t format, const float* table) {
  int32_t units = 0;
  with_decoder(format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    if constexpr (!std::is_same<Decoder, Decoded>::value) {
      units = (has_tiles() ? AMX : 0) | (has_quads<Decoder>(table) ? AVX512_VNNI : 0) |
              (has_fast_pairs() ? AVX512_BF16 : 0);
    }
  });
  return units;
}

int32_t pt2mx_linear(const LinearCall* given, ParallelFor parallel_for) {
  if (!can_finish(*given)) return kUnserved;
  LinearCall own = *given, *call = &own;
  std::vector<float> rotated;
  if (own.rotation) own.x = rotate_copy(own.rotation, own.dtype, own.x, own.m * own.k, rotated);
  Linear linear(own);
  int32_t error = 0;
  with_decoder(call->format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    if constexpr (!std::is_same<Decoder, Decoded>::value) {
      const bool many = call->m > kFewRows;
      error = multiply_on_units<Decoder>(linear, many, parallel_for);
      if (many || error != kUnserved) return;
    }
    const i64 tiles = (call->n + kRows - 1) / kRows;
    const i64 grain = std::max<i64>(1, kGrain / (kRows * call->m * call->k));
    using Pairs = typename PairsOf<Decoder>::type;
    if constexpr (!std::is_void<Pairs>::value) {
      if (call->m == 1 && call->dtype == BF16 && has_pairs() && !has_tiny_values(*call)) {
        error = multiply_in_pairs<Pairs, Decoder>(linear, tiles, grain, parallel_for);
        return;
      }
    }
    prepare(linear, Decoder::kPairs);
    error = parallel_for(0, tiles, grain, call->m == 1 ? run<Decoder, 1> : run<Decoder, 4>, &linear);
  });
  return error;
}

int32_t pt2mx_convolution(const ConvolutionCall* call, ParallelFor parallel_for) {
  if (!can_finish(call->linear)) return kUnserved;
  if (is_of_lines(*call)) return multiply_lines(*call, parallel_for);
  Linear linear(call->linear, call);
  int32_t error = kUnserved;
  with_decoder(call->linear.format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    if constexpr (!std::is_same<Decoder, Decoded>::value) {
      error = multiply_on_units<Decoder>(linear, true, parallel_for);
    }
  });
  return error;
}

}  // extern "C"
