// Activations and layer norms, quantized in the kernel that computes them, row by row; built and called by
// ../activations.py. If quantize_vec.h does not support the format, the kernel stores the activation, and quantize.cpp
// quantizes it in a second pass.

#include <memory>
#include <vector>

#include "activation.h"
#include "quantize_vec.h"

namespace {

constexpr i64 kGrain = 1 << 14;  // values that are worth another thread
constexpr i64 kLong = 1 << 13;   // values of a row that is split into blocks, for all threads
constexpr i64 kCommon = 32;      // values of the usual block, which stays in registers

// ---- rows ----

struct Work {
  const ActivationCall& call;  // without a spec, activations are stored unquantized
  const VecQuantizer quantizer;
  std::vector<float> weight, bias;  // of a norm, padded with zeros
};

// Loads `count` values of x from `at` on, and zeros after them.
template <int D>
inline Floats load_some(const void* x, i64 at, i64 count) {
  if (count >= kWidth) return widened(x, D, at);
  constexpr i64 size = D == FP32 ? 4 : 2;
  u8 values[kWidth * size] = {};
  std::memcpy(values, static_cast<const u8*>(x) + at * size, count * size);
  return widened(values, D, 0);
}

inline void store_some(void* out, int32_t dtype, i64 at, i64 count, Floats v) {
  if (count >= kWidth) return store_as(out, dtype, at, v);
  const i64 size = dtype == FP32 ? 4 : 2;
  u8 values[kWidth * 4];
  store_as(values, dtype, 0, v);
  std::memcpy(static_cast<u8*>(out) + at * size, values, count * size);
}

// Quantizes and stores a row that begins at `at`. values(i, count) returns `count` of its values from i on, rounded to
// its dtype, and zeros after them.
template <class Values>
inline void finish_row(const Work& work, i64 at, Floats* block, Values values) {
  const ActivationCall& c = work.call;
  const VecQuantizer quantizer = work.quantizer;
  const bool quantizes = c.spec;
  for (i64 first = 0; first < c.n; first += c.block) {
    const i64 n = std::min(c.block, c.n - first), to = at + first;
    if (n == kCommon) {
      Floats v[kCommon / kWidth];
      for (i64 i = 0; i < kCommon / kWidth; ++i) v[i] = values(first + i * kWidth, kWidth);
      if (quantizes) quantizer.quantize(v, kCommon / kWidth);
      for (i64 i = 0; i < kCommon / kWidth; i += 2) store_two(c.out, c.out_dtype, to + i * kWidth, v[i], v[i + 1]);
      continue;
    }
    const i64 vectors = (n + kWidth - 1) / kWidth;
    for (i64 i = 0; i < vectors; ++i) block[i] = values(first + i * kWidth, n - i * kWidth);
    if (quantizes) quantizer.quantize(block, vectors);
    for (i64 i = 0; i < vectors; ++i) store_some(c.out, c.out_dtype, to + i * kWidth, n - i * kWidth, block[i]);
  }
}

template <int D, int A>
inline void run_activation(const Work& work, i64 row, Floats* block) {
  const i64 at = row * work.call.n;
  finish_row(work, at, block, [&](i64 i, i64 count) __attribute__((always_inline)) {
    const Floats x = load_some<D>(work.call.x, at + i, count);
    return A == NONE || A == RELU ? activated<A>(x) : rounded(activated<A>(x), D);
  });
}

// Sums n values: term(i, sum) adds the vector at i to a sum.
template <class Term>
inline double sum_over(i64 n, Term term) {
  constexpr i64 kSums = 4;
  Floats sums[kSums] = {};
  i64 i = 0;
  for (; i + kSums * kWidth <= n; i += kSums * kWidth) {
    for (i64 k = 0; k < kSums; ++k) sums[k] = term(i + k * kWidth, sums[k]);
  }
  for (; i < n; i += kWidth) sums[0] = term(i, sums[0]);
  double sum = 0;
  for (const Floats& lanes : sums) {
    for (i64 lane = 0; lane < kWidth; ++lane) sum += lanes[lane];
  }
  return sum;
}

// The layer norm of a row; values: scratch of a row and a vector. The mean is mean + low, two floats. Two passes sum
// differences to an estimate; the second one corrects the rounding error of the first. So the norm of equal values is
// zero.
template <int D>
inline void run_norm(const Work& work, i64 row, Floats* block, float* values) {
  const ActivationCall& c = work.call;
  const i64 at = row * c.n, end = (c.n + kWidth - 1) / kWidth * kWidth, padding = end - c.n;
  for (i64 i = 0; i < c.n; i += kWidth) {
    Floats x = load_some<D>(c.x, at + i, c.n - i);
    if (c.residual) x = rounded(x + load_some<D>(c.residual, at + i, c.n - i), D);
    store(values + i, x);
  }
  float mean = values[0], low = 0;
  const auto difference = [&](i64 i) __attribute__((always_inline)) { return (load<Floats>(values + i) - mean) - low; };
  for (int pass = 0; pass < 2; ++pass) {
    std::fill(values + c.n, values + end, mean);  // their difference is -low
    const auto add = [&](i64 i, Floats sum) __attribute__((always_inline)) { return sum + difference(i); };
    const double sum = sum_over(c.n, add) + double(padding) * low, exact = double(mean) + low + sum / double(c.n);
    mean = float(exact), low = float(exact - mean);
  }
  std::fill(values + c.n, values + end, mean);
  const auto add_square = [&](i64 i, Floats sum) __attribute__((always_inline)) {
    const Floats x = difference(i);
    return fused(x, x, sum);
  };
  const double squares = sum_over(c.n, add_square) - double(padding) * low * low;
  const float inverse = 1.0f / std::sqrt(float(squares / double(c.n)) + c.eps);
  finish_row(work, at, block, [&](i64 i, i64 count) __attribute__((always_inline)) {
    const Floats x = difference(i) * inverse;
    const Floats y = rounded(fused(x, load<Floats>(&work.weight[i]), load<Floats>(&work.bias[i])), D);
    if (c.normed) store_some(c.normed, D, at + i, count, y);
    return y;
  });
}

template <int D>
void run_rows(i64 begin, i64 end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const ActivationCall& c = work.call;
  const KeepSubnormals keep;
  std::vector<Floats> block((c.block + kWidth - 1) / kWidth);
  std::vector<float> values(c.is_norm ? c.n + kWidth : 0);
  const auto each = [&](auto run) {
    for (i64 row = begin; row < end; ++row) run(row);
  };
  if (c.is_norm) return each([&](i64 row) { run_norm<D>(work, row, block.data(), values.data()); });
  switch (c.activation) {
    case GELU: return each([&](i64 row) { run_activation<D, GELU>(work, row, block.data()); });
    case GELU_TANH: return each([&](i64 row) { run_activation<D, GELU_TANH>(work, row, block.data()); });
    case SILU: return each([&](i64 row) { run_activation<D, SILU>(work, row, block.data()); });
    case RELU: return each([&](i64 row) { run_activation<D, RELU>(work, row, block.data()); });
    default: return each([&](i64 row) { run_activation<D, NONE>(work, row, block.data()); });
  }
}

// Returns n values of x as fp32, or n times `value` if x is null. NaNs become the canonical one, which `rounded` keeps.
std::vector<float> norm_parameter(const void* x, int32_t dtype, i64 n, float value) {
  std::vector<float> out(n + kWidth);
  if (!x) std::fill(out.begin(), out.begin() + n, value);
  else get_floats(x, 0, n, dtype, out.data());
  for (float& y : out) y = y == y ? y : from_bits(0x7FC00000);
  return out;
}

int32_t run(ActivationCall call, const Spec& spec, ParallelFor parallel_for) {
  if (!call.is_norm && call.n > kLong && call.n % call.block == 0) {  // rows for all threads
    call.rows *= call.n / call.block;
    call.n = call.block;
  }
  Work work{call, VecQuantizer(spec, call.out_dtype), {}, {}};
  if (call.is_norm) {
    work.weight = norm_parameter(call.weight, call.weight_dtype, call.n, 1.0f);
    work.bias = norm_parameter(call.bias, call.bias_dtype, call.n, 0.0f);
  }
  constexpr decltype(&run_rows<FP32>) kRun[] = {run_rows<FP32>, run_rows<FP16>, run_rows<BF16>};
  return parallel_for(0, call.rows, std::max<i64>(1, kGrain / call.n), kRun[call.dtype], &work);
}

}  // namespace

extern "C" {

int32_t pt2mx_quantize_activation(const ActivationCall* call, ParallelFor parallel_for) {
  const Spec& spec = *call->spec;
  if (VecQuantizer::supports(spec, call->block, call->n)) return run(*call, spec, parallel_for);
  ActivationCall stored = *call;
  std::unique_ptr<u8[]> memory;
  if (!call->normed) memory.reset(new u8[call->rows * call->n * (call->dtype == FP32 ? 4 : 2)]);
  stored.out = call->normed ? call->normed : memory.get();
  stored.spec = nullptr;
  stored.normed = nullptr;
  stored.out_dtype = call->dtype;
  stored.block = std::min(kCommon, call->n);
  if (const int32_t error = run(stored, spec, parallel_for)) return error;
  QuantizeCall quantization{};
  quantization.spec = &spec;
  quantization.operation = FAKE_QUANTIZE;
  quantization.dtype = call->dtype;
  quantization.out_dtype = call->out_dtype;
  quantization.outer = call->rows;
  quantization.n = call->n;
  quantization.inner = 1;
  quantization.block = call->block;
  quantization.x = stored.out;
  quantization.out = call->out;
  return pt2mx_run(&quantization, parallel_for);
}

int32_t pt2mx_quantize_activation_of(const ActivationCall* call, const void* x, void* out, ParallelFor parallel_for) {
  ActivationCall own = *call;  // other threads may share the call
  own.x = x;
  own.out = out;
  return pt2mx_quantize_activation(&own, parallel_for);
}

}  // extern "C"
