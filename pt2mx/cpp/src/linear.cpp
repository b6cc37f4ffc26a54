// linear_mx, grouped_linear_mx, linear_fake_quantize_mx: as pt2mx/kernels/cpu/linear.py has
// them, with the same choice of kernel.

#include <algorithm>

#include "packed_weight.h"

namespace pt2mx {
namespace {

// True if bfloat16 represents all values of x, which is contiguous.
bool are_bf16(const Tensor& x) {
  const auto* bits = static_cast<const uint32_t*>(x.const_data_ptr());
  return std::all_of(bits, bits + x.numel(), [](uint32_t value) { return !(value & 0xFFFF); });
}

}  // namespace

Tensor linear(const Tensor& original, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& element, int64_t block_size, int64_t rotation,
              const std::optional<ScalarType>& target_dtype, const std::optional<std::string>& scale_format,
              std::optional<int64_t> block_rows, const std::optional<Tensor>&) {
  check_scales(scale_format, block_rows);
  const PackedWeight weight{data, scale, element_of(element), block_size};
  STD_TORCH_CHECK(original.dim() > 0 && data.dim() == 2, "linear_mx takes (..., K) and a weight of two dimensions");
  Shape shape = shape_of(original);
  const int64_t k = shape.back(), rows = numel(shape, 0, shape.size() - 1), n = data.size(0);
  const ScalarType dtype = target_dtype.value_or(original.scalar_type());
  check_packed(weight, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == dtype), "linear_mx: the bias does not fit");
  Tensor x = original;
  if (rotation && (rows > kVectorRows || !rows)) {  // on all threads
    x = hadamard(x, rotation, -1);
    rotation = 0;
  }
  const auto dense_matmul = [&] {
    return call("aten::linear", dtype == x.scalar_type() ? x : torch::stable::to(x, dtype),
                dequantize(weight, dtype, k), bias);
  };
  const int32_t isa = pt2mx_isa_of_rows(isa_for(weight, k), dtype_of(x), rows);
  if (!x.numel() || !n || (rows > kFewRows && !isa)) return dense_matmul();
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, dtype);
  LinearOperands operands(x, weight, bias, out, isa);
  operands.call.rotation = rotation;
  return is_computed(pt2mx_linear(&operands.call, torch_parallel_for)) ? out : dense_matmul();
}

Tensor grouped_linear(const Tensor& original, const Tensor& data, const Tensor& scale, const Tensor& offs,
                      const std::string& element, int64_t block_size, const std::optional<ScalarType>& target_dtype,
                      const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows,
                      const std::optional<Tensor>&) {
  check_scales(scale_format, block_rows);
  STD_TORCH_CHECK(original.dim() == 2 && data.dim() == 3 && scale.dim() == 3,
                  "grouped_linear_mx takes (T, K) and (E, N, K)");
  STD_TORCH_CHECK(offs.scalar_type() == ScalarType::Int && shape_of(offs) == Shape{data.size(0)},
                  "grouped_linear_mx takes an end of rows for each expert");
  const Tensor ends = dense(offs);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  const ScalarType dtype = target_dtype.value_or(original.scalar_type());
  Tensor x = dense(original);
  const bool many_rows = dtype_of(x) == FP32 && dtype == ScalarType::Float && x.size(0) > kFewRows;
  if (many_rows && isa_for({data, scale, element_of(element), block_size}, x.size(1)) && are_bf16(x)) {
    x = torch::stable::to(x, ScalarType::BFloat16);
  }
  Tensor out = torch::stable::empty({x.size(0), data.size(1)}, dtype);
  torch::stable::zero_(out);
  for (int64_t expert = 0, first = 0; expert < data.size(0); first = end[expert++]) {
    const int64_t rows = end[expert] - first;
    if (rows <= 0) continue;
    const Tensor y = linear(torch::stable::narrow(x, 0, first, rows), torch::stable::select(data, 0, expert),
                            torch::stable::select(scale, 0, expert), std::nullopt, element, block_size, 0, dtype);
    Tensor slice = torch::stable::narrow(out, 0, first, rows);
    torch::stable::copy_(slice, y);
  }
  return out;
}

Tensor linear_fake_quantize(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
                            const std::string& element, int64_t block_size,
                            const std::optional<ScalarType>& product_dtype, const std::string& activation,
                            const std::string& out_element, int64_t out_block_size, const std::string& scale_mode,
                            const std::string& rounding, const std::optional<ScalarType>& target_dtype) {
  const PackedWeight weight{data, scale, element_of(element), block_size};
  STD_TORCH_CHECK(x.dim() > 0 && data.dim() == 2,
                  "linear_fake_quantize_mx takes (..., K) and a weight of two dimensions, not ", data.dim());
  STD_TORCH_CHECK(out_block_size > 0, "a block has at least 1 value, not ", out_block_size);
  STD_TORCH_CHECK(rounding != "stochastic", "a product is not rounded stochastically: quantize its result");
  Shape shape = shape_of(x);
  const int64_t k = shape.back(), rows = numel(shape, 0, shape.size() - 1), n = data.size(0);
  const ScalarType matmul_dtype = product_dtype.value_or(x.scalar_type()), dtype = target_dtype.value_or(matmul_dtype);
  check_packed(weight, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == matmul_dtype),
                  "linear_fake_quantize_mx: the bias does not fit");
  const auto in_two_steps = [&] {
    const Tensor y = linear(x, data, scale, bias, element, block_size, 0, product_dtype);
    return activation_fake_quantize(y, activation, out_element, out_block_size, scale_mode, rounding, dtype);
  };
  const bool many_rows = dtype_of(x) == BF16 && rows > kFewRows && x.numel() && n;
  const int32_t isa = many_rows ? isa_for(weight, k) : 0;
  if (!isa) return in_two_steps();
  const Spec spec = spec_of(element_of(out_element), out_block_size, scale_mode, rounding);
  const Epilogue epilogue{&spec, number_of_activation(activation), dtype_of(dtype), std::min(out_block_size, n)};
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, dtype);
  LinearOperands operands(x, weight, bias, out, isa);
  operands.call.out_dtype = dtype_of(matmul_dtype);
  operands.call.epilogue = &epilogue;
  return is_computed(pt2mx_linear(&operands.call, torch_parallel_for)) ? out : in_two_steps();
}

}  // namespace pt2mx
