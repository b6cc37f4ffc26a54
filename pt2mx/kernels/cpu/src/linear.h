// Shared by all kernels of linear_mx: the call and the data prepared for it, the scales of the weight's groups,
// storing sums, and the tasks of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "buffer.h"
#include "decode.h"
#include "im2col.h"
#include "quantize_vec.h"

namespace {

constexpr int kRows = kWidth == 16 ? 4 : 2;  // rows of the weight that a thread multiplies together
constexpr i64 kChunk = 128;                  // groups whose factors are converted at a time
constexpr i64 kAhead = 6144;  // bytes from the codes of one row of x being decoded to those prefetched, as measured

struct Linear {
  const LinearCall& call;
  const Im2col im2col;
  const i64 tap_groups;                   // of a tap; the last one may be partial
  const i64 groups;                       // of a row
  const float result_factor;              // that makes up for a tensor scale which the decoded weight does not count
  Buffer<float> x;                        // (m rounded up to 4, groups * kGroup) in the order of the decoder; `prepare`
  std::vector<float> bias;                // (n), or empty
  std::optional<VecQuantizer> quantizer;  // of the epilogue
  std::mutex preparing;                   // `prepare_once`

  explicit Linear(const LinearCall& c, const ConvolutionCall* convolution = nullptr)
      : call(c),
        im2col(c, convolution),
        tap_groups((c.k + kGroup - 1) / kGroup),
        groups(im2col.taps * tap_groups),
        result_factor(c.float_scale ? applied(1, *c.float_scale, c.tensor_scale) : 1) {
    if (c.epilogue) quantizer.emplace(*c.epilogue->spec, c.epilogue->out_dtype);
    if (!c.bias) return;
    bias.resize(c.n);
    get_floats(c.bias, 0, c.n, c.out_dtype, bias.data());
  }

  // Returns the call of one tap, with its slice of the weight's rows.
  LinearCall call_of(i64 tap) const {
    LinearCall c = call;
    c.data += tap * (c.row_bytes / im2col.taps);
    c.scale += tap * (c.row_blocks / im2col.taps);
    return c;
  }
};

// Converts x to fp32, in the order in which a decoder returns values.
void prepare(Linear& linear, bool even_odd) {
  const LinearCall& c = linear.call;
  const i64 stride = linear.groups * kGroup, rows = (c.m + 3) / 4 * 4;
  linear.x.resize(rows * stride);
  std::vector<float> row(stride);
  for (i64 m = 0; m < c.m; ++m) {
    get_floats(c.x, m * c.k, c.k, c.dtype, row.data());
    float* out = linear.x.data() + m * stride;
    for (i64 first = 0; first < stride; first += kGroup) {
      for (i64 i = 0; i < kGroup; ++i) out[first + i] = row[first + index_in_group(even_odd, i)];
    }
  }
}

// Does so for the first thread that falls back to linear_fp32.h. A mutex instead of std::call_once, whose symbol would
// ask for glibc 2.34.
inline void prepare_once(Linear& linear, bool even_odd) {
  const std::lock_guard<std::mutex> lock(linear.preparing);
  if (!linear.x.size()) prepare(linear, even_odd);
}

// Stores the sums y: (n) at (m, row) of the output, with the bias.
void finish(const Linear& linear, i64 m, i64 row, i64 n, float* y) {
  if (!linear.bias.empty()) {
    for (i64 i = 0; i < n; ++i) y[i] += linear.bias[row + i];
  }
  put_floats(y, n, linear.call.out_dtype, linear.call.out, m * linear.call.n + row);
}

// Copies the codes of a row's last group of `kValues`, which is partial, and pads them with zeros.
template <class Decoder, i64 kValues = kGroup>
const u8* last_group(const LinearCall& c, i64 row, u8* out) {
  const i64 begin = c.k / kValues * Decoder::kBytes, bits = c.k % kValues * c.bits;
  std::memset(out, 0, Decoder::kBytes);
  std::memcpy(out, c.data + row * c.row_bytes + begin, (bits + 7) / 8);
  if (bits % 8) out[bits / 8] &= (1 << bits % 8) - 1;  // the bits after the last code are undefined
  return out;
}

// Returns the scale of each of the groups [begin, end), where `per_block` groups share one: a pointer into `scale`, or
// a copy in `expanded`.
inline const u8* scales_of_groups(const u8* scale, i64 per_block, i64 begin, i64 end, u8* expanded) {
  if (per_block == 1) return scale + begin;
  for (i64 g = begin; g < end; ++g) expanded[g - begin] = scale[g / per_block];
  return expanded;
}

// The least and the largest of scale bytes.
struct ByteRange {
  u8 min = 255, max = 0;

  ByteRange(const u8* bytes, i64 n) {
    typedef u8 Lanes __attribute__((vector_size(4 * kWidth)));
    constexpr i64 kBytes = sizeof(Lanes);
    if (n < 2 * kBytes) {
      add(bytes, n);
      return;
    }
    Lanes least = load<Lanes>(bytes), most = least;
    for (i64 i = kBytes; i < n; i += kBytes) {
      const Lanes next = load<Lanes>(bytes + std::min(i, n - kBytes));  // the last ones overlap
      least = smaller(least, next);
      most = larger(most, next);
    }
    const Lanes ends[] = {least, most};
    add(reinterpret_cast<const u8*>(ends), sizeof ends);
  }
  bool is_within(i64 least, i64 most) const { return min >= least && max <= most; }

 private:
  void add(const u8* bytes, i64 n) {
    u8 least = min, most = max;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (i64 i = 0; i < n; ++i) {  // std::min would not become a vector instruction
      least = bytes[i] < least ? bytes[i] : least;
      most = bytes[i] > most ? bytes[i] : most;
    }
    min = least;
    max = most;
  }
};

// Returns the range of the scales of rows of the weight, and of the next ones, which a kernel reads past a row.
inline ByteRange scales_of_rows(const LinearCall& c, i64 row, i64 rows, i64 next = 0) {
  return {c.scale + row * c.row_blocks, std::min(rows * c.row_blocks + next, (c.n - row) * c.row_blocks)};
}

// The factors of up to kChunk groups of a row.
struct Scales {
  float one[kChunk];
  TwoFactors two[kChunk];
  bool ordinary;  // one factor suffices, and no value is subnormal: a decoder returns values of at least 2**-24

  // Sets `one` for the groups [begin, end), where `per_block` groups share a scale.
  void set(const u8* scale, i64 per_block, i64 begin, i64 end, int32_t shift) {
    u8 expanded[kChunk];
    const u8* bytes = scales_of_groups(scale, per_block, begin, end, expanded);
    for (i64 i = 0; i < end - begin; ++i) one[i] = from_bits(u32(bytes[i] + shift) << 23);
    ordinary = ByteRange(bytes, end - begin).is_within(25 - shift, 254 - std::max(shift, 0));
  }

  // Sets `two`, if a row is not ordinary.
  void split(const u8* scale, i64 per_block, i64 begin, i64 end, int32_t shift) {
    for (i64 g = begin; g < end; ++g) two[g - begin] = factors_of(scale[g / per_block], shift);
  }
};

// Writes the factors of the groups [begin, end) of a row, at most kChunk, for scales with a significand. t: multiplies
// them; shift: as of a decoder. Returns the result of load_scales.
inline bool set_half_factors(const LinearCall& c, i64 row, i64 begin, i64 end, float t, int32_t shift,
                             HalfFactors* out) {
  const float factor = t * from_bits((kBias + shift) << 23) / c.float_scale->unit;
  const i64 in_row = row * c.row_blocks;
  if (2 * c.block == kGroup) {
    const i64 count = std::min(2 * end, (c.k + kGroup / 2 - 1) / (kGroup / 2)) - 2 * begin;
    out[end - begin - 1].second = 0;  // of a last group of one block
    return load_scales(*c.float_scale, c.scale, in_row + 2 * begin, count, factor, &out->first);
  }
  float scales[2 * kChunk];
  const i64 first = begin * kGroup / c.block, last = std::min(end * kGroup, c.k) - 1;
  const bool usual = load_scales(*c.float_scale, c.scale, in_row + first, last / c.block + 1 - first, factor, scales);
  for (i64 g = begin; g < end; ++g) {
    const i64 middle = std::min(g * kGroup + kGroup / 2, last);
    out[g - begin] = {scales[g * kGroup / c.block - first], scales[middle / c.block - first]};
  }
  return usual;
}

struct Task {
  int64_t top, bottom, first, last;  // rows, columns
};

// The tasks of a GEMM: blocks of its result. A thread that finishes a task takes the next one, so that no thread waits
// for another. Tasks of the same columns are consecutive, so that a thread often has these columns decoded already.
class Tasks {
 public:
  explicit Tasks(const LinearCall& c)
      : call_(c), down_((c.m + c.task_rows - 1) / c.task_rows), across_((c.n + c.task_columns - 1) / c.task_columns) {}

  int64_t count() const { return down_ * across_; }

  // Returns false when all tasks are taken.
  bool take(Task& task) {
    const int64_t at = taken_++, row = at % down_ * call_.task_rows, column = at / down_ * call_.task_columns;
    task = {row, std::min(row + call_.task_rows, call_.m), column, std::min(column + call_.task_columns, call_.n)};
    return at < count();
  }

 private:
  const LinearCall& call_;
  const int64_t down_, across_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace
