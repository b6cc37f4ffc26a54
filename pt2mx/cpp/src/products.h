// What products with packed weights share.

#pragma once

#include "tensors.h"

namespace pt2mx {

// The call of the kernels, as pt2mx/kernels/cpu/linear.py has it. x: (..., K), data: (N, ..., bytes), scale: (N, ...,
// blocks), bias: (N,), out: (..., N), contiguous; `taps`: values of x, K each, that a row of the weight multiplies.
LinearCall call_of(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
                   Tensor& out, const Element& element, int64_t block_size, int32_t isa, int64_t taps = 1);

}  // namespace pt2mx
