// The epilogue of a GEMM: bias, residual, activation and quantization, applied to the sums before they are stored.

#pragma once

#include "activation.h"
#include "isa.h"
#include "linear.h"

namespace {

constexpr int kMicroVectors = kNR / kWidth;  // of a row of a micro-tile

// Replaces any NaN by the canonical one, which `rounded` keeps.
inline Floats or_nan(Floats x) { return x == x ? x : Floats(ints(0x7FC00000)); }

// Stores rows of kNR sums: row r goes to row positions[r] of the output, from `column` on. kDtype: of the matmul.
template <int32_t kDtype, bool kQuantized>
NOINLINE void finish_rows(const Linear& linear, const i64* positions, i64 rows, i64 column, const float* sums) {
  const LinearCall& c = linear.call;
  Floats bias[kMicroVectors];
  for (int i = 0; i < kMicroVectors; ++i) {  // -0: adding it changes nothing
    bias[i] = linear.bias.empty() ? Floats(ints(kSign)) : load<Floats>(linear.bias.data() + column + i * kWidth);
  }
  const VecQuantizer* const quantizer = kQuantized ? &*linear.quantizer : nullptr;
  const Epilogue none{nullptr, NONE, kDtype, kNR, nullptr, nullptr}, &e = kQuantized ? *c.epilogue : none;
  const auto store_row = [](void* out, int32_t dtype, i64 at, const Floats* y) {
    for (int i = 0; i < kMicroVectors; i += 2) store_two(out, dtype, at + i * kWidth, y[i], y[i + 1]);
  };
  for (i64 r = 0; r < rows; ++r, sums += kNR) {
    const i64 at = positions[r] * c.n + column;
    Floats y[kMicroVectors];
    for (int i = 0; i < kMicroVectors; ++i) {
      y[i] = rounded(or_nan(load<Floats>(sums + i * kWidth) + bias[i]), kDtype);
      if (kQuantized && e.residual) y[i] = rounded(or_nan(y[i] + widened(e.residual, kDtype, at + i * kWidth)), kDtype);
      if (kQuantized) y[i] = rounded(activated(e.activation, y[i]), kDtype);
    }
    if (kQuantized && e.activated) store_row(e.activated, kDtype, at, y);
    if (kQuantized) quantizer->quantize(y, kMicroVectors);
    store_row(c.out, e.out_dtype, at, y);
  }
}

// Stores the first `rows` rows and `n` columns of a micro-tile.
void finish_micro_tile(const Linear& linear, const i64* positions, i64 rows, i64 column, i64 n, float* sums) {
  const int32_t dtype = linear.call.out_dtype;
  for (i64 i = 0; i < rows * kNR && linear.result_factor != 1; ++i) sums[i] *= linear.result_factor;
  if (n < kNR || dtype == FP16) {
    for (i64 r = 0; r < rows; ++r) finish(linear, positions[r], column, n, sums + r * kNR);
  } else if (linear.quantizer) {
    (dtype == FP32 ? finish_rows<FP32, true> : finish_rows<BF16, true>)(linear, positions, rows, column, sums);
  } else {
    (dtype == FP32 ? finish_rows<FP32, false> : finish_rows<BF16, false>)(linear, positions, rows, column, sums);
  }
}

}  // namespace
