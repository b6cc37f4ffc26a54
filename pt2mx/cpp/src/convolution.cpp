// conv2d_mx: as pt2mx/kernels/cpu/convolution.py has it, with the same choice of kernel.

#include "products.h"

namespace pt2mx {
namespace {

void check_pair(const Shape& pair, int64_t least) {
  STD_TORCH_CHECK(pair.size() == 2 && std::min(pair[0], pair[1]) >= least, "conv2d_mx: stride, padding or dilation");
}

Tensor every(const Tensor& x, int64_t dimension, int64_t step) {
  const std::optional<int64_t> none;
  return step == 1 ? x : call_overload("aten::slice", "Tensor", x, dimension, none, none, step);
}

// (B, H, W, C) -> (B, C, H, W), or back
Tensor channels_first(const Tensor& x) { return call("aten::permute", x, Shape{0, 3, 1, 2}); }
Tensor channels_last(const Tensor& x) { return call("aten::permute", x, Shape{0, 2, 3, 1}); }

}  // namespace

Tensor conv2d(const Tensor& given, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& name, int64_t block_size, const Shape& given_stride, const Shape& padding,
              const Shape& dilation, const std::optional<ScalarType>& target_dtype) {
  const Element& element = element_of(name);
  STD_TORCH_CHECK(given.dim() == 4 && data.dim() == 4, "conv2d_mx takes (B, H, W, C) and (N, *kernel, bytes of C)");
  const ScalarType result = target_dtype.value_or(given.scalar_type());
  const int64_t k = given.size(3), n = data.size(0), kernel[] = {data.size(1), data.size(2)};
  check_packed(data, scale, element, block_size, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == result), "conv2d_mx: the bias does not fit");
  check_pair(given_stride, 1);
  check_pair(padding, 0);
  check_pair(dilation, 1);
  Tensor x = given;
  Shape stride = given_stride;
  if (kernel[0] == 1 && kernel[1] == 1 && !padding[0] && !padding[1]) {  // what lies between the strides is not read
    x = every(every(x, 1, stride[0]), 2, stride[1]);
    stride = {1, 1};
  }
  ConvolutionCall call{};
  Shape shape = {x.size(0), 0, 0, n};
  for (int d = 0; d < 2; ++d) {
    call.size[d] = x.size(1 + d);
    call.out_size[d] = (call.size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) / stride[d] + 1;
    call.kernel[d] = kernel[d];
    call.stride[d] = stride[d];
    call.padding[d] = padding[d];
    call.dilation[d] = dilation[d];
    shape[1 + d] = call.out_size[d];
  }
  const auto dense_product = [&] {
    const Tensor weight = channels_first(dequantize(data, scale, element, block_size, result, k));
    const Tensor images = channels_first(result == x.scalar_type() ? x : torch::stable::to(x, result));
    const int64_t groups = 1;
    return dense(channels_last(pt2mx::call("aten::conv2d", images, weight, bias, stride, padding, dilation, groups)));
  };
  const Blocks blocks = blocks_of(element, block_size, k);
  const int32_t units = dtype_of(x) == BF16 ? pt2mx_units(blocks.decoder, table_of(element)) : 0;
  if (!units || !x.numel() || !n) return dense_product();
  Tensor out = torch::stable::empty(shape, result);
  const Tensor values = dense(x), codes = dense(data), scales = dense(scale);
  const std::optional<Tensor> added = bias ? std::optional(dense(*bias)) : std::nullopt;
  call.linear = call_of(values, codes, scales, added, out, element, block_size, units, kernel[0] * kernel[1]);
  call.pixels = x.size(0) * x.size(1) * x.size(2);
  const int32_t error = pt2mx_convolution(&call, torch_parallel_for);
  if (error == kUnserved) return dense_product();
  check_served(error);
  return out;
}

}  // namespace pt2mx
