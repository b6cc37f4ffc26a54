// Packed weights, and the matmuls with them.

#pragma once

#include "tensors.h"

namespace pt2mx {

// Codes and scales in blocks along the last dimension.
struct PackedWeight {
  const Tensor& data;
  const Tensor& scale;
  const Element& element;
  int64_t block_size;

  Blocks blocks(int64_t k) const { return blocks_of(element, block_size, k); }
};

// Refuses scales other than E8M0, and blocks of several rows.
void check_scales(const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows = {});

// Refuses codes and scales that are not those of `n` values along the last dimension.
void check_packed(const PackedWeight& weight, int64_t n);

// Returns the values of a weight, `n` along the last dimension.
Tensor dequantize(const PackedWeight& weight, ScalarType dtype, int64_t n);

// Returns the instruction sets that multiply rows of k bfloat16 values by a weight, as bits of Isa.
int32_t isa_for(const PackedWeight& weight, int64_t k);

// The call of the kernels for a matmul, as pt2mx/kernels/cpu/linear.py fills it, with contiguous copies of the
// operands. x: (..., K), the weight: (N, ..., K), bias: (N,), out: (..., N), contiguous; taps: values of x, K each,
// that a row of the weight multiplies.
struct LinearOperands {
  const Tensor x, data, scale;
  const std::optional<Tensor> bias;
  LinearCall call{};

  LinearOperands(const Tensor& x, const PackedWeight& weight, const std::optional<Tensor>& bias, Tensor& out,
                 int32_t isa, int64_t taps = 1);
};

}  // namespace pt2mx
