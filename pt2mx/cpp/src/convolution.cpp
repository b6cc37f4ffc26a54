// conv2d_mx, conv2d_fake_quantize_mx: as pt2mx/kernels/cpu/convolution.py has them, with the same choice of kernel.

#include <algorithm>
#include <functional>

#include "packed_weight.h"

namespace pt2mx {
namespace {

void check_pair(const Shape& pair, int64_t least) {
  STD_TORCH_CHECK(pair.size() == 2 && std::min(pair[0], pair[1]) >= least, "conv2d_mx: stride, padding or dilation");
}

Tensor every(const Tensor& x, int64_t dimension, int64_t step) {
  const std::optional<int64_t> none;
  return step == 1 ? x : call_overload("aten::slice", "Tensor", x, dimension, none, none, step);
}

Tensor in_dtype(const Tensor& x, ScalarType dtype) {
  return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

// Adds in float32. aten::add has a scalar argument, which torch's stable interface does not support.
Tensor sum_of(const Tensor& a, const Tensor& b, ScalarType dtype) {
  const Tensor x = dense(in_dtype(a, ScalarType::Float)), y = dense(in_dtype(b, ScalarType::Float));
  Tensor out = torch::stable::empty(shape_of(x), ScalarType::Float);
  const float* values = static_cast<const float*>(x.const_data_ptr());
  std::transform(values, values + x.numel(), static_cast<const float*>(y.const_data_ptr()),
                 static_cast<float*>(out.mutable_data_ptr()), std::plus<float>());
  return in_dtype(out, dtype);
}

// (B, H, W, C) -> (B, C, H, W), and back.
Tensor channels_first(const Tensor& x) { return call("aten::permute", x, Shape{0, 3, 1, 2}); }
Tensor channels_last(const Tensor& x) { return call("aten::permute", x, Shape{0, 2, 3, 1}); }

class Convolution {
 public:
  const ScalarType dtype;  // of the matmul
  Shape shape;             // of the result

  Convolution(const Tensor& x, const PackedWeight& weight, const std::optional<Tensor>& bias, const Shape& stride,
              const Shape& padding, const Shape& dilation, const std::optional<ScalarType>& target_dtype)
      : dtype(target_dtype.value_or(x.scalar_type())),
        x_(x),
        weight_(weight),
        bias_(bias),
        stride_(stride),
        padding_(padding),
        dilation_(dilation) {
    const Tensor& data = weight.data;
    STD_TORCH_CHECK(x.dim() == 4 && data.dim() == 4, "conv2d_mx takes (B, H, W, C) and (N, *kernel, bytes of C)");
    const int64_t n = data.size(0), kernel[] = {data.size(1), data.size(2)};
    check_packed(weight, x.size(3));
    STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == dtype), "conv2d_mx: the bias does not fit");
    check_pair(stride, 1);
    check_pair(padding, 0);
    check_pair(dilation, 1);
    if (kernel[0] == 1 && kernel[1] == 1 && !padding[0] && !padding[1]) {  // pixels between the strides are not read
      x_ = every(every(x, 1, stride[0]), 2, stride[1]);
      stride_ = {1, 1};
    }
    shape = {x_.size(0), 0, 0, n};
    for (int d = 0; d < 2; ++d) {
      call_.size[d] = x_.size(1 + d);
      call_.out_size[d] = (call_.size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) / stride_[d] + 1;
      call_.kernel[d] = kernel[d];
      call_.stride[d] = stride_[d];
      call_.padding[d] = padding[d];
      call_.dilation[d] = dilation[d];
      shape[1 + d] = call_.out_size[d];
    }
  }

  // Computes the result, or what an epilogue makes of it. Returns false if the kernels computed nothing.
  bool multiply_on_isa(Tensor& out, const Epilogue* epilogue = nullptr) {
    const int32_t isa = dtype_of(x_) == BF16 ? isa_for(weight_, x_.size(3)) : 0;
    if (!isa || !x_.numel() || !out.numel()) return false;
    LinearOperands operands(x_, weight_, bias_, out, isa, call_.kernel[0] * call_.kernel[1]);
    call_.linear = operands.call;
    call_.linear.out_dtype = dtype_of(dtype);
    call_.linear.epilogue = epilogue;
    call_.pixels = x_.size(0) * x_.size(1) * x_.size(2);
    return is_computed(pt2mx_convolution(&call_, torch_parallel_for));
  }

  Tensor by_torch() const {
    const Tensor weight = channels_first(dequantize(weight_, dtype, x_.size(3)));
    const Tensor images = channels_first(in_dtype(x_, dtype));
    const int64_t groups = 1;
    return dense(channels_last(call("aten::conv2d", images, weight, bias_, stride_, padding_, dilation_, groups)));
  }

  Tensor result() {
    Tensor out = torch::stable::empty(shape, dtype);
    return multiply_on_isa(out) ? out : by_torch();
  }

 private:
  Tensor x_;
  const PackedWeight weight_;
  const std::optional<Tensor> bias_;
  Shape stride_, padding_, dilation_;
  ConvolutionCall call_{};
};

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& element, int64_t block_size, const Shape& stride, const Shape& padding,
              const Shape& dilation, const std::optional<ScalarType>& target_dtype,
              const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows,
              const std::optional<Tensor>&) {
  check_scales(scale_format, block_rows);
  const PackedWeight weight{data, scale, element_of(element), block_size};
  return Convolution(x, weight, bias, stride, padding, dilation, target_dtype).result();
}

std::tuple<Tensor, Tensor> conv2d_fake_quantize(
    const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
    const std::string& element, int64_t block_size, const Shape& stride, const Shape& padding, const Shape& dilation,
    const std::optional<ScalarType>& product_dtype, const std::optional<Tensor>& residual,
    const std::string& activation, bool keep_activated, const std::string& out_element, int64_t out_block_size,
    const std::string& scale_mode, const std::string& rounding, const std::optional<ScalarType>& target_dtype) {
  STD_TORCH_CHECK(out_block_size > 0, "a block has at least 1 value, not ", out_block_size);
  STD_TORCH_CHECK(rounding != "stochastic", "a product is not rounded stochastically: quantize its result");
  const PackedWeight weight{data, scale, element_of(element), block_size};
  Convolution convolution(x, weight, bias, stride, padding, dilation, product_dtype);
  STD_TORCH_CHECK(!residual || shape_of(*residual) == convolution.shape, "the residual does not fit");
  if (residual) dtype_of(*residual);  // refuses other dtypes
  const int32_t number = number_of_activation(activation);
  const Shape kept = keep_activated ? convolution.shape : Shape{0};
  const bool alike = !residual || residual->scalar_type() == convolution.dtype;
  const ScalarType sum_dtype = alike ? convolution.dtype : ScalarType::Float, dtype = target_dtype.value_or(sum_dtype);
  if (alike && numel(convolution.shape, 0, 3) > kFewRows) {
    const Spec spec = spec_of(element_of(out_element), out_block_size, scale_mode, rounding);
    const std::optional<Tensor> added = residual ? std::optional(dense(*residual)) : std::nullopt;
    Tensor activated = torch::stable::empty(kept, sum_dtype), out = torch::stable::empty(convolution.shape, dtype);
    const Epilogue epilogue{&spec,
                            number,
                            dtype_of(dtype),
                            std::min(out_block_size, convolution.shape[3]),
                            added ? added->const_data_ptr() : nullptr,
                            keep_activated ? activated.mutable_data_ptr() : nullptr};
    if (convolution.multiply_on_isa(out, &epilogue)) return {activated, out};
  }
  const Tensor matmul = convolution.result(), sum = residual ? sum_of(matmul, *residual, sum_dtype) : matmul;
  const Tensor quantized =
      activation_fake_quantize(sum, activation, out_element, out_block_size, scale_mode, rounding, dtype);
  return {keep_activated ? activation_of(sum, activation) : torch::stable::empty(kept, sum_dtype), quantized};
}

}  // namespace pt2mx
