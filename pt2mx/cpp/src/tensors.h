// Tensors by torch's stable C++ interface, and the functions that the files share.

#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "elements.h"

namespace pt2mx {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;

inline Shape shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

// Multiplies the sizes of dimensions [first, last).
inline int64_t numel(const Shape& shape, size_t first, size_t last) {
  int64_t n = 1;
  for (size_t d = first; d < last; ++d) n *= shape[d];
  return n;
}

inline Dtype dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return FP32;
    case ScalarType::Half: return FP16;
    default: STD_TORCH_CHECK(type == ScalarType::BFloat16, "pt2mx takes float32, float16 or bfloat16");
  }
  return BF16;
}
inline Dtype dtype_of(const Tensor& x) { return dtype_of(x.scalar_type()); }

inline Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Raises torch's errors.
inline void check_error(int32_t error) { STD_TORCH_CHECK(error == 0, "torch_parallel_for failed"); }

// False if a kernel has computed nothing.
inline bool is_computed(int32_t error) {
  if (error != kUnsupported) check_error(error);
  return error != kUnsupported;
}

// Calls an overload of one of torch's operators, which returns one tensor.
template <class... Arguments>
Tensor call_overload(const char* name, const char* overload, const Arguments&... arguments) {
  StableIValue stack[] = {torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
template <class... Arguments>
Tensor call(const char* name, const Arguments&... arguments) {
  return call_overload(name, "", arguments...);
}

// ---- activations ----

// aten's activation.
Tensor activation_of(const Tensor& x, const std::string& name);
// Its number in the kernels.
int32_t number_of_activation(const std::string& name);

// ---- the operators, with the parameters of their schemas ----

Tensor hadamard(const Tensor& x, int64_t size, int64_t axis);
Tensor rotated_fake_quantize(const Tensor& x, int64_t size, const std::string& element, int64_t block_size,
                             const std::string& scale_mode, const std::string& rounding,
                             const std::optional<ScalarType>& target_dtype);
Tensor activation_fake_quantize(const Tensor& x, const std::string& activation, const std::string& element,
                                int64_t block_size, const std::string& scale_mode, const std::string& rounding,
                                const std::optional<ScalarType>& target_dtype);
std::tuple<Tensor, Tensor> layer_norm_fake_quantize(const Tensor& x, const std::optional<Tensor>& residual,
                                                    const std::optional<Tensor>& weight,
                                                    const std::optional<Tensor>& bias, double eps,
                                                    const std::string& element, int64_t block_size,
                                                    const std::string& scale_mode, const std::string& rounding,
                                                    const std::optional<ScalarType>& target_dtype);
Tensor random_bits(const Tensor& seed, const Shape& size);
Tensor linear(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& element, int64_t block_size, int64_t rotation,
              const std::optional<ScalarType>& target_dtype, const std::optional<std::string>& scale_format = {},
              std::optional<int64_t> block_rows = {}, const std::optional<Tensor>& tensor_scale = {});
Tensor linear_fake_quantize(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
                            const std::string& element, int64_t block_size,
                            const std::optional<ScalarType>& product_dtype, const std::string& activation,
                            const std::string& out_element, int64_t out_block_size, const std::string& scale_mode,
                            const std::string& rounding, const std::optional<ScalarType>& target_dtype);
Tensor grouped_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const Tensor& offs,
                      const std::string& element, int64_t block_size, const std::optional<ScalarType>& target_dtype,
                      const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows,
                      const std::optional<Tensor>& tensor_scale);
Tensor conv2d(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& element, int64_t block_size, const Shape& stride, const Shape& padding,
              const Shape& dilation, const std::optional<ScalarType>& target_dtype,
              const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows,
              const std::optional<Tensor>& tensor_scale);
std::tuple<Tensor, Tensor> conv2d_fake_quantize(
    const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
    const std::string& element, int64_t block_size, const Shape& stride, const Shape& padding, const Shape& dilation,
    const std::optional<ScalarType>& product_dtype, const std::optional<Tensor>& residual,
    const std::string& activation, bool keep_activated, const std::string& out_element, int64_t out_block_size,
    const std::string& scale_mode, const std::string& rounding, const std::optional<ScalarType>& target_dtype);
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& key_scale, const Tensor& value,
                 const Tensor& value_scale, const std::string& element, int64_t block_size, int64_t value_width,
                 const std::optional<Tensor>& mask, const std::optional<double>& scale,
                 const std::optional<std::string>& scale_format, const std::optional<Tensor>& key_tensor_scale,
                 const std::optional<Tensor>& value_tensor_scale);
Tensor matmul_bfloat16(const Tensor& x, const Tensor& y, const std::optional<ScalarType>& target_dtype);
Tensor attention_bfloat16(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& mask, bool is_causal, const std::optional<double>& scale,
                          const std::optional<ScalarType>& target_dtype, const std::optional<std::string>& element,
                          int64_t block_size, const std::string& scale_mode, const std::string& rounding,
                          const std::optional<ScalarType>& out_dtype);

}  // namespace pt2mx
