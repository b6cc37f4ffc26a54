// Packed weights: checks, values, and the call of the kernels.

#include "packed_weight.h"

#include <algorithm>

namespace pt2mx {

void check_scales(const std::optional<std::string>& scale_format, std::optional<int64_t> block_rows) {
  STD_TORCH_CHECK(scale_format.value_or("e8m0") == "e8m0" && block_rows.value_or(1) == 1,
                  "this library takes E8M0 scales of one row, not ", scale_format.value_or("e8m0"), " of ",
                  block_rows.value_or(1), " rows: run the package in Python with pt2mx");
}

void check_packed(const PackedWeight& weight, int64_t n) {
  const auto& [data, scale, element, block_size] = weight;
  Shape shape = shape_of(data);
  STD_TORCH_CHECK(!shape.empty() && block_size > 0, "codes have a dimension, and blocks a value at least");
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte && scale.scalar_type() == ScalarType::Byte,
                  "codes and scales are uint8");
  STD_TORCH_CHECK(shape.back() == packed_length(element, n), n, " codes of ", element.name, " do not take ",
                  shape.back(), " bytes");
  shape.back() = (n + block_size - 1) / block_size;
  STD_TORCH_CHECK(shape_of(scale) == shape, "the scales do not fit the codes");
}

Tensor dequantize(const PackedWeight& weight, ScalarType dtype, int64_t n) {
  Shape shape = shape_of(weight.data);
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, dtype);
  if (!out.numel()) return out;
  const Tensor codes = dense(weight.data), scales = dense(weight.scale);
  const Spec spec = spec_of(weight.element, weight.block_size);
  QuantizeCall call{};
  call.spec = &spec;
  call.operation = DEQUANTIZE;
  call.dtype = call.out_dtype = dtype_of(out);
  call.outer = out.numel() / n;
  call.n = n;
  call.inner = 1;
  call.block = std::min(weight.block_size, n);
  call.x = codes.const_data_ptr();
  call.scale = static_cast<uint8_t*>(scales.data_ptr());
  call.out = out.mutable_data_ptr();
  call.table = table_of(weight.element);
  call.format = weight.blocks(n).decoder;
  check_error(pt2mx_run(&call, torch_parallel_for));
  return out;
}

int32_t isa_for(const PackedWeight& weight, int64_t k) {
  return pt2mx_isa(weight.blocks(k).decoder, table_of(weight.element));
}

LinearOperands::LinearOperands(const Tensor& x, const PackedWeight& weight, const std::optional<Tensor>& bias,
                               Tensor& out, int32_t isa, int64_t taps)
    : x(dense(x)),
      data(dense(weight.data)),
      scale(dense(weight.scale)),
      bias(bias ? std::optional(dense(*bias)) : std::nullopt) {
  const int64_t k = x.size(-1), n = out.size(-1);
  const Element& element = weight.element;
  const Blocks blocks = weight.blocks(k);
  call.table = table_of(element);
  call.format = blocks.decoder;
  call.bits = element.bits;
  call.codes_per_group = element.codes_per_group;
  call.bytes_per_group = element.bytes_per_group;
  call.dtype = dtype_of(x);
  call.out_dtype = dtype_of(out);
  call.isa = isa;
  call.integer_isa = pt2mx_integer_isa(blocks.decoder, call.table);
  call.m = out.numel() / n;
  call.n = n;
  call.k = k;
  call.block = blocks.size;
  call.row_bytes = data.numel() / n;
  call.row_blocks = scale.numel() / n;
  call.x = this->x.const_data_ptr();
  call.data = static_cast<const uint8_t*>(data.const_data_ptr());
  call.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  call.bias = bias ? this->bias->const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  if (isa) pt2mx_set_tasks(&call, taps, torch::stable::get_num_threads());
}

}  // namespace pt2mx
