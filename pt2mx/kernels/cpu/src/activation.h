// Activations in fp32, closer to the exact values than torch's.

#pragma once

#include "values.h"

namespace {

// 0.5 + x P(x**2) / Q(x**2), a minimax fit with an error of 8e-9 up to |x| = 5.54; beyond, the result is 0 or 1.
inline Floats normal_distribution(Floats x) {
  constexpr float p[] = {6.35233755e-06f, 0.000170771746f, 0.00468882034f, 0.0340567939f, 0.398942232f};
  constexpr float q[] = {7.42036354e-05f, 0.0018954823f, 0.0287602618f, 0.252033561f, 1.0f};
  const Floats z = larger(smaller(x, floats(5.54f)), floats(-5.54f)), s = z * z;
  Floats above = floats(2.25035279e-08f), below = floats(1.19035974e-06f);
  for (int i = 0; i < 5; ++i) {
    above = fused(above, s, floats(p[i]));
    below = fused(below, s, floats(q[i]));
  }
  return larger(fused(z, above / below, floats(0.5f)), floats(0.0f));
}

// Returns 1 + exp(x); Inf from 2**128 on.
inline Floats one_plus_exp(Floats x) {
  constexpr float coefficients[] = {8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f};
  const Floats t = larger(smaller(x, floats(89.0f)), floats(-87.0f));
  const Floats whole = (t * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;
  const Floats fraction = fused(whole, floats(2.12194440e-4f), fused(whole, floats(-0.693359375f), t));
  Floats y = floats(1.3888889e-3f);
  for (const float c : coefficients) y = fused(y, fraction, floats(c));
  return fused(y, Floats((__builtin_convertvector(whole, Ints) + kBias) << 23), floats(1.0f));
}

enum Activation { NONE, GELU, GELU_TANH, SILU, RELU };

template <int A>
inline Floats activated(Floats x) {
  switch (A) {
    case GELU: return x * normal_distribution(x);
    case GELU_TANH: return x / one_plus_exp(x * fused(x * x, floats(-0.0713548163f), floats(-1.59576912f)));
    case SILU: return x / one_plus_exp(-x);
    case RELU: return x < 0.0f ? floats(0.0f) : x;
    default: return x;
  }
}

inline Floats activated(int32_t activation, Floats x) {
  switch (activation) {
    case GELU: return activated<GELU>(x);
    case GELU_TANH: return activated<GELU_TANH>(x);
    case SILU: return activated<SILU>(x);
    case RELU: return activated<RELU>(x);
    default: return x;
  }
}

}  // namespace
