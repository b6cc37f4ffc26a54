// matmul_bfloat16, attention_bfloat16: as pt2mx/kernels/cpu/bf16_matmul.py has them, with the same choice of
// kernel.

#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace pt2mx {
namespace {

constexpr int64_t kMinRows = 16, kMaxWidth = 512;

const float* floats_of(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }

Tensor transposed(const Tensor& x) { return call_overload("aten::transpose", "int", x, int64_t(1), int64_t(2)); }

// Returns x, or a contiguous copy if the stride of the last dimension is not 1.
Tensor with_rows(const Tensor& x) { return x.stride(x.dim() - 1) == 1 ? x : dense(x); }

// Returns the strides of the last four dimensions, 0 for missing ones. x with more dimensions must be contiguous.
Shape strides_of(const Tensor& x) {
  Shape strides;
  for (int64_t d = std::max<int64_t>(0, x.dim() - 4); d < x.dim(); ++d) strides.push_back(x.stride(d));
  strides.insert(strides.begin(), 4 - strides.size(), 0);
  if (x.dim() > 4) strides[0] = x.size(-3) * strides[1];
  return strides;
}

void copy_strides(const Shape& strides, int64_t n, int64_t* out) {
  std::copy(strides.begin(), strides.begin() + n, out);
}

// Returns a mask with four dimensions, which broadcast to `sizes`.
Tensor in_four_dimensions(const Tensor& mask, const Shape& sizes) {
  Shape shape = shape_of(mask);
  shape.insert(shape.begin(), 4 - shape.size(), 1);
  STD_TORCH_CHECK(std::equal(shape.begin(), shape.end(), sizes.begin(),
                             [](int64_t n, int64_t size) { return n == 1 || n == size; }),
                  "attention_bfloat16 takes a mask that broadcasts to (batch, heads, queries, keys)");
  return torch::stable::reshape(mask, shape);
}

}  // namespace

Tensor matmul_bfloat16(const Tensor& original, const Tensor& other, const std::optional<ScalarType>& target_dtype) {
  const Shape x_shape = shape_of(original), y_shape = shape_of(other);
  const int64_t dimensions = original.dim(), batch = dimensions - 2;
  const ScalarType result = target_dtype.value_or(original.scalar_type());
  STD_TORCH_CHECK(dimensions >= 2 && other.dim() == dimensions && x_shape.back() == y_shape[batch] &&
                      std::equal(x_shape.begin(), x_shape.begin() + batch, y_shape.begin()) &&
                      original.scalar_type() == other.scalar_type(),
                  "matmul_bfloat16 takes (*batch, M, K) and (*batch, K, N) of one dtype");
  dtype_of(original), dtype_of(result);  // refuses other dtypes
  const Tensor rows = torch::stable::to(original, result), columns = torch::stable::to(other, result);
  const auto multiply = [&] { return call("aten::matmul", rows, columns); };
  const int32_t isa = pt2mx_bf16_isa();
  const bool computed = original.numel() && other.numel();
  if (result != ScalarType::Float || !isa || x_shape[batch] < kMinRows || !computed) return multiply();
  const bool flat = dimensions > 4;
  const Tensor x = flat ? dense(rows) : with_rows(rows);
  const bool strided = !flat && (columns.stride(batch) == 1 || columns.stride(batch + 1) == 1);
  const Tensor y = strided ? columns : dense(columns);
  Shape shape = x_shape;
  shape.back() = y_shape.back();
  Tensor out = torch::stable::empty(shape, result);
  MatmulCall task{};
  task.isa = isa;
  task.threads = torch::stable::get_num_threads();
  task.second = batch ? x_shape[batch - 1] : 1;
  task.first = numel(x_shape, 0, batch) / task.second;
  task.m = x_shape[batch];
  task.k = x_shape.back();
  task.n = y_shape.back();
  copy_strides(strides_of(x), 3, task.x_stride);
  copy_strides(strides_of(y), 4, task.y_stride);
  task.x = floats_of(x);
  task.y = floats_of(y);
  task.out = static_cast<float*>(out.mutable_data_ptr());
  if (!is_computed(pt2mx_matmul(&task, torch_parallel_for))) return multiply();
  return out;
}

namespace {

Tensor attend(const Tensor& original, const Tensor& original_key, const Tensor& original_value,
              const std::optional<Tensor>& mask, bool is_causal, const std::optional<double>& scale,
              const std::optional<ScalarType>& target_dtype) {
  const ScalarType result = target_dtype.value_or(original.scalar_type());
  const Tensor query = torch::stable::to(original, result), key = torch::stable::to(original_key, result);
  const Tensor value = torch::stable::to(original_value, result);
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && (!mask || mask->dim() <= 4),
                  "attention_bfloat16 takes tensors of four dimensions");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t key_heads = key.size(1), keys = key.size(2), value_width = value.size(3);
  dtype_of(original), dtype_of(result);
  STD_TORCH_CHECK(original_key.scalar_type() == original.scalar_type() &&
                      original_value.scalar_type() == original.scalar_type() &&
                      (!mask || mask->scalar_type() == ScalarType::Bool || mask->scalar_type() == result),
                  "attention_bfloat16 takes operands of one dtype, and a mask of booleans or of the result's dtype");
  STD_TORCH_CHECK(key.size(0) == batch && (key_heads ? heads % key_heads == 0 : heads == 0) && key.size(3) == width &&
                      value.size(0) == batch && value.size(1) == key_heads && value.size(2) == keys &&
                      !(mask && is_causal),
                  "attention_bfloat16: query, key, value and mask do not fit");
  std::optional<Tensor> full_mask;
  if (mask) full_mask = in_four_dimensions(*mask, {batch, heads, queries, keys});
  const auto dense_attention = [&] {
    const Tensor y = call("aten::scaled_dot_product_attention", query, key, value, full_mask, 0.0, is_causal, scale,
                          heads != key_heads);
    return transposed(dense(transposed(y)));
  };
  const int32_t isa = pt2mx_bf16_isa();
  const bool computed = query.numel() && value.numel();
  const bool supported = result == ScalarType::Float || result == ScalarType::BFloat16;
  if (!supported || !isa || queries < kMinRows || width > kMaxWidth || !computed) return dense_attention();
  const Tensor operands[] = {with_rows(query), with_rows(key), with_rows(value)};
  Tensor out = torch::stable::empty({batch, queries, heads, value_width}, result);
  DenseAttentionCall task{};
  task.isa = isa;
  task.causal = is_causal;
  task.dtype = dtype_of(query);
  task.threads = torch::stable::get_num_threads();
  task.batch = batch;
  task.heads = heads;
  task.group = heads / key_heads;
  task.queries = queries;
  task.keys = keys;
  task.width = width;
  task.value_width = value_width;
  task.factor = float(scale ? *scale : std::pow(double(width), -0.5));
  int64_t* strides[] = {task.query_stride, task.key_stride, task.value_stride};
  for (int i = 0; i < 3; ++i) copy_strides(strides_of(operands[i]), 3, strides[i]);
  task.query = operands[0].const_data_ptr();
  task.key = operands[1].const_data_ptr();
  task.value = operands[2].const_data_ptr();
  task.out = out.mutable_data_ptr();
  if (full_mask) {
    Shape shape = shape_of(*full_mask);
    if (shape[3] != keys || full_mask->stride(3) != 1) {  // keys must be adjacent
      shape[3] = keys;
      full_mask = dense(call("aten::expand", *full_mask, shape, false));
    }
    for (int64_t d = 0; d < 3; ++d) task.mask_stride[d] = shape[d] == 1 ? 0 : full_mask->stride(d);
    const void* values = full_mask->const_data_ptr();
    if (full_mask->scalar_type() == ScalarType::Bool) task.bool_mask = static_cast<const uint8_t*>(values);
    else task.additive_mask = values;
  }
  if (!is_computed(pt2mx_dense_attention(&task, torch_parallel_for))) return dense_attention();
  return transposed(out);
}

}  // namespace

Tensor attention_bfloat16(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& mask, bool is_causal, const std::optional<double>& scale,
                          const std::optional<ScalarType>& target_dtype, const std::optional<std::string>& element,
                          int64_t block_size, const std::string& scale_mode, const std::string& rounding,
                          const std::optional<ScalarType>& out_dtype) {
  const Tensor y = attend(query, key, value, mask, is_causal, scale, target_dtype);
  STD_TORCH_CHECK(element || !out_dtype, "attention_bfloat16: out_dtype is of a quantized result");
  if (!element) return y;
  const Tensor rows = transposed(y);
  return transposed(activation_fake_quantize(rows, "none", *element, block_size, scale_mode, rounding, out_dtype));
}

}  // namespace pt2mx
