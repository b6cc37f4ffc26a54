// What is made of the sums of a product of many rows before they are stored: a bias, an activation, and quantization.
// Included by linear.cpp.

#pragma once

#if defined(PT2MX_TILES)

namespace {

// Rows of kPair sums, in `dtype`, to the output from its value (m, column) on.
template <int32_t kDtype, bool kQuantized>
NOINLINE void finish_rows(const Linear& linear, i64 m, i64 rows, i64 column, const float* sums) {
  const LinearCall& c = linear.call;
  Floats bias[2] = {Floats(ints(kSign)), Floats(ints(kSign))};  // to add -0 changes nothing
  for (int i = 0; i < 2 && !linear.bias.empty(); ++i) bias[i] = load<Floats>(linear.bias.data() + column + i * kWidth);
  const InRegisters* const quantizer = kQuantized ? &*linear.quantizer : nullptr;
  const int32_t activation = kQuantized ? c.epilogue->activation : NONE;
  const int32_t out_dtype = kQuantized ? c.epilogue->out_dtype : kDtype;
  for (i64 r = 0, at = m * c.n + column; r < rows; ++r, at += c.n, sums += kPair) {
    Floats y[2];
    for (int i = 0; i < 2; ++i) {
      y[i] = load<Floats>(sums + i * kWidth) + bias[i];
      y[i] = rounded(y[i] == y[i] ? y[i] : Floats(ints(0x7FC00000)), kDtype);
      if (kQuantized) y[i] = rounded(activated(activation, y[i]), kDtype);
    }
    if (kQuantized) quantizer->quantize(y, 2);
    store_two(c.out, out_dtype, at, y[0], y[1]);
  }
}

// The same of up to kPair sums a row.
void finish_square(const Linear& linear, i64 m, i64 rows, i64 column, i64 n, float* sums) {
  const int32_t dtype = linear.call.out_dtype;
  if (n < kPair || dtype == FP16) {
    for (i64 r = 0; r < rows; ++r) finish(linear, m + r, column, n, sums + r * kPair);
  } else if (linear.quantizer) {
    (dtype == FP32 ? finish_rows<FP32, true> : finish_rows<BF16, true>)(linear, m, rows, column, sums);
  } else {
    (dtype == FP32 ? finish_rows<FP32, false> : finish_rows<BF16, false>)(linear, m, rows, column, sums);
  }
}

}  // namespace

#endif
