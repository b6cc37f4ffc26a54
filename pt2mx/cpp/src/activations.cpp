// activation_fake_quantize_mx, layer_norm_fake_quantize_mx: as pt2mx/kernels/cpu/activations.py has them.

#include <algorithm>

#include "tensors.h"

namespace pt2mx {
namespace {

// In the order of the kernels' enumeration.
constexpr const char* kActivations[] = {"none", "gelu", "gelu_tanh", "silu", "relu"};

// Sets the other fields of a call, whose other tensors are set, and runs it.
void run(ActivationCall& call, const Tensor& x, const std::string& element, int64_t block_size,
         const std::string& scale_mode, const std::string& rounding, const Tensor& out) {
  STD_TORCH_CHECK(block_size > 0 && rounding != "stochastic", "values are not rounded like this");
  if (!x.numel()) return;
  const Spec spec = spec_of(element_of(element), block_size, scale_mode, rounding);
  call.spec = &spec;
  call.dtype = dtype_of(x);
  call.out_dtype = dtype_of(out);
  call.n = x.dim() ? x.size(x.dim() - 1) : 1;
  call.rows = x.numel() / call.n;
  call.block = std::min(block_size, call.n);
  call.x = x.const_data_ptr();
  call.out = out.mutable_data_ptr();
  check_error(pt2mx_quantize_activation(&call, torch_parallel_for));
}

}  // namespace

int32_t number_of_activation(const std::string& name) {
  const auto* position = std::find(std::begin(kActivations), std::end(kActivations), name);
  STD_TORCH_CHECK(position != std::end(kActivations), "no activation: ", name);
  return int32_t(position - std::begin(kActivations));
}

Tensor activation_of(const Tensor& x, const std::string& name) {
  if (name == "none") return x;
  if (name == "gelu") return call("aten::gelu", x, std::string("none"));
  if (name == "gelu_tanh") return call("aten::gelu", x, std::string("tanh"));
  return name == "silu" ? call("aten::silu", x) : call("aten::relu", x);
}

Tensor activation_fake_quantize(const Tensor& original, const std::string& activation, const std::string& element,
                                int64_t block_size, const std::string& scale_mode, const std::string& rounding,
                                const std::optional<ScalarType>& target_dtype) {
  const Tensor x = dense(original);
  const Tensor out = torch::stable::empty(shape_of(x), target_dtype.value_or(x.scalar_type()));
  ActivationCall call{};
  call.activation = number_of_activation(activation);
  run(call, x, element, block_size, scale_mode, rounding, out);
  return out;
}

std::tuple<Tensor, Tensor> layer_norm_fake_quantize(const Tensor& original, const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight,
                                                    const std::optional<Tensor>& bias, double eps,
                                                    const std::string& element, int64_t block_size,
                                                    const std::string& scale_mode, const std::string& rounding,
                                                    const std::optional<ScalarType>& target_dtype) {
  const Tensor x = dense(original);
  STD_TORCH_CHECK(x.dim() > 0, "a layer norm is of rows");
  STD_TORCH_CHECK(!residual || (residual->scalar_type() == x.scalar_type() && shape_of(*residual) == shape_of(x)),
                  "the residual must have the shape and the dtype of x");
  const Tensor normed = torch::stable::empty(shape_of(x), x.scalar_type());
  const Tensor out = torch::stable::empty(shape_of(x), target_dtype.value_or(x.scalar_type()));
  Tensor kept[3];  // while the kernel reads them
  const auto take = [&](const std::optional<Tensor>& from, int index, int32_t* dtype) -> const void* {
    if (!from) return nullptr;
    STD_TORCH_CHECK(!dtype || shape_of(*from) == Shape{x.size(x.dim() - 1)}, "a norm has one weight for each column");
    kept[index] = dense(*from);
    if (dtype) *dtype = dtype_of(kept[index]);
    return kept[index].const_data_ptr();
  };
  ActivationCall call{};
  call.is_norm = 1;
  call.eps = float(eps);
  call.residual = take(residual, 0, nullptr);
  call.weight = take(weight, 1, &call.weight_dtype);
  call.bias = take(bias, 2, &call.bias_dtype);
  call.normed = normed.mutable_data_ptr();
  run(call, x, element, block_size, scale_mode, rounding, out);
  return {normed, out};
}

}  // namespace pt2mx
