// linear_fake_quantize_mx: as pt2mx/kernels/cpu/quantized_linear.py has it.

#include <algorithm>

#include "products.h"

namespace pt2mx {

Tensor linear_fake_quantize(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
                            const std::string& name, int64_t block_size, const std::optional<ScalarType>& product_dtype,
                            const std::string& activation, const std::string& out_name, int64_t out_block_size,
                            const std::string& scale_mode, const std::string& rounding,
                            const std::optional<ScalarType>& target_dtype) {
  const Element& element = element_of(name);
  STD_TORCH_CHECK(x.dim() > 0 && data.dim() == 2,
                  "linear_fake_quantize_mx takes (..., K) and a weight of two dimensions, not ", data.dim());
  STD_TORCH_CHECK(out_block_size > 0, "a block has at least 1 value, not ", out_block_size);
  STD_TORCH_CHECK(rounding != "stochastic", "a product is not rounded stochastically: quantize its result");
  Shape shape = shape_of(x);
  const int64_t k = shape.back(), rows = product(shape, 0, shape.size() - 1), n = data.size(0);
  const ScalarType of_product = product_dtype.value_or(x.scalar_type()), result = target_dtype.value_or(of_product);
  check_packed(data, scale, element, block_size, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == of_product),
                  "linear_fake_quantize_mx: the bias does not fit");
  const auto in_two_steps = [&] {
    const Tensor y = linear(x, data, scale, bias, name, block_size, 0, product_dtype);
    return activation_fake_quantize(y, activation, out_name, out_block_size, scale_mode, rounding, result);
  };
  const Blocks blocks = blocks_of(element, block_size, k);
  const bool is_served = dtype_of(x) == BF16 && rows > kFewRows && x.numel() && n;
  const int32_t isa = is_served ? pt2mx_isa(blocks.decoder, table_of(element)) : 0;
  if (!isa) return in_two_steps();
  const Spec spec = spec_of(element_of(out_name), out_block_size, scale_mode, rounding);
  const Epilogue epilogue{&spec, number_of_activation(activation), dtype_of(result), std::min(out_block_size, n)};
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, result);
  const Tensor values = dense(x), codes = dense(data), scales = dense(scale);
  const std::optional<Tensor> added = bias ? std::optional(dense(*bias)) : std::nullopt;
  LinearCall call = call_of(values, codes, scales, added, out, element, block_size, isa);
  call.out_dtype = dtype_of(of_product);
  call.epilogue = &epilogue;
  const int32_t error = pt2mx_linear(&call, torch_parallel_for);
  if (error == kUnsupported) return in_two_steps();
  check_served(error);
  return out;
}

}  // namespace pt2mx
