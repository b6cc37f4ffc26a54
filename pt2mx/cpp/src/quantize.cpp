// hadamard, rotated_fake_quantize_mx, random_bits: as pt2mx/kernels/cpu/quantize.py and hadamard.py have them.

#include <algorithm>

#include "tensors.h"

namespace pt2mx {
namespace {

void check_rotation(const Tensor& x, int64_t size, int64_t axis) {
  STD_TORCH_CHECK(axis >= 0 && axis < x.dim(), "hadamard: no such axis");
  STD_TORCH_CHECK(size > 0 && (size & (size - 1)) == 0 && x.size(axis) % size == 0, "hadamard: blocks of ", size,
                  " do not rotate ", x.size(axis), " values");
}

}  // namespace

Tensor hadamard(const Tensor& original, int64_t size, int64_t axis) {
  const Tensor x = dense(original);
  const size_t along = size_t(axis < 0 ? axis + x.dim() : axis);
  check_rotation(x, size, int64_t(along));
  const Shape shape = shape_of(x);
  Tensor out = torch::stable::empty(shape, x.scalar_type());
  if (!x.numel()) return out;
  HadamardCall call{};
  call.dtype = dtype_of(x);
  call.outer = numel(shape, 0, along);
  call.n = shape[along];
  call.inner = numel(shape, along + 1, shape.size());
  call.size = size;
  call.x = x.const_data_ptr();
  call.out = out.mutable_data_ptr();
  check_error(pt2mx_hadamard(&call, torch_parallel_for));
  return out;
}

Tensor rotated_fake_quantize(const Tensor& original, int64_t size, const std::string& element, int64_t block_size,
                             const std::string& scale_mode, const std::string& rounding,
                             const std::optional<ScalarType>& target_dtype) {
  Tensor x = dense(original);
  check_rotation(x, size, x.dim() - 1);
  STD_TORCH_CHECK(block_size > 0 && rounding != "stochastic", "rotated values are not rounded like this");
  Tensor out = torch::stable::empty(shape_of(x), target_dtype.value_or(x.scalar_type()));
  if (!x.numel()) return out;
  if (size > 1 && out.scalar_type() != x.scalar_type()) {  // rotates to a tensor of its own first
    x = hadamard(x, size, -1);
    size = 1;
  }
  const Spec spec = spec_of(element_of(element), block_size, scale_mode, rounding);
  QuantizeCall call{};
  call.spec = &spec;
  call.operation = FAKE_QUANTIZE;
  call.dtype = dtype_of(x);
  call.out_dtype = dtype_of(out);
  call.n = x.size(x.dim() - 1);
  call.outer = x.numel() / call.n;
  call.inner = 1;
  call.block = std::min(block_size, call.n);
  call.x = x.const_data_ptr();
  call.out = out.mutable_data_ptr();
  check_error(size > 1 ? pt2mx_rotate_fake_quantize(&call, size, torch_parallel_for)
                       : pt2mx_run(&call, torch_parallel_for));
  return out;
}

Tensor random_bits(const Tensor& seed, const Shape& size) {
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 1, "the seed is one int64");
  Tensor out = torch::stable::empty(size, ScalarType::Int);
  const auto value = *static_cast<const int64_t*>(seed.const_data_ptr());
  auto* numbers = static_cast<int32_t*>(out.mutable_data_ptr());
  check_error(pt2mx_random_bits(uint64_t(value), numbers, out.numel(), torch_parallel_for));
  return out;
}

}  // namespace pt2mx
