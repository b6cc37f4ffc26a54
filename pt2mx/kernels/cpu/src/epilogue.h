// What is made of the sums of a product of many rows before they are stored: a bias, a residual, an activation, and
// quantization. Included by linear.cpp.

#pragma once

#if defined(PT2MX_TILES)

namespace {

// The one NaN that `rounded` keeps, where x is any.
inline Floats or_nan(Floats x) { return x == x ? x : Floats(ints(0x7FC00000)); }

// Rows of kPair sums, in `dtype`, to the output: from the value `column` of the row that `places` has for each.
template <int32_t kDtype, bool kQuantized>
NOINLINE void finish_rows(const Linear& linear, const i64* places, i64 rows, i64 column, const float* sums) {
  const LinearCall& c = linear.call;
  Floats bias[2] = {Floats(ints(kSign)), Floats(ints(kSign))};  // to add -0 changes nothing
  for (int i = 0; i < 2 && !linear.bias.empty(); ++i) bias[i] = load<Floats>(linear.bias.data() + column + i * kWidth);
  const InRegisters* const quantizer = kQuantized ? &*linear.quantizer : nullptr;
  const Epilogue none{nullptr, NONE, kDtype, kPair, nullptr, nullptr}, &e = kQuantized ? *c.epilogue : none;
  for (i64 r = 0; r < rows; ++r, sums += kPair) {
    const i64 at = places[r] * c.n + column;
    Floats y[2];
    for (int i = 0; i < 2; ++i) {
      y[i] = rounded(or_nan(load<Floats>(sums + i * kWidth) + bias[i]), kDtype);
      if (kQuantized && e.residual) y[i] = rounded(or_nan(y[i] + widened(e.residual, kDtype, at + i * kWidth)), kDtype);
      if (kQuantized) y[i] = rounded(activated(e.activation, y[i]), kDtype);
    }
    if (kQuantized && e.activated) store_two(e.activated, kDtype, at, y[0], y[1]);
    if (kQuantized) quantizer->quantize(y, 2);
    store_two(c.out, e.out_dtype, at, y[0], y[1]);
  }
}

// The same of up to kPair sums a row.
void finish_square(const Linear& linear, const i64* places, i64 rows, i64 column, i64 n, float* sums) {
  const int32_t dtype = linear.call.out_dtype;
  if (n < kPair || dtype == FP16) {
    for (i64 r = 0; r < rows; ++r) finish(linear, places[r], column, n, sums + r * kPair);
  } else if (linear.quantizer) {
    (dtype == FP32 ? finish_rows<FP32, true> : finish_rows<BF16, true>)(linear, places, rows, column, sums);
  } else {
    (dtype == FP32 ? finish_rows<FP32, false> : finish_rows<BF16, false>)(linear, places, rows, column, sums);
  }
}

}  // namespace

#endif
