// Packed weights: checks, values, and the call of the kernels.

#include "packed_weight.h"

#include <algorithm>

namespace pt2mx {
namespace {

constexpr int64_t kDecoded = 1 << 20;  // bytes of the weight that a thread decodes at a time, for a second-level cache
constexpr int64_t kPanel = 32;         // columns of a panel
// The most values of K that AMX decodes at a time, and the most rows of x whose sums wait for the next ones.
constexpr int64_t kDecodedK = 2048, kWaitingRows = 1024;

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Sets how many rows and columns of the result one thread computes at a time: `_task` of linear.py.
void set_task(LinearCall& call, int64_t k) {
  const int64_t threads = torch::stable::get_num_threads(), panels = parts(call.n, kPanel);
  const bool in_parts = call.isa & AMX && k > kDecodedK;
  const int64_t most =
      std::max<int64_t>(1, std::min<int64_t>(32, kDecoded / (2 * (in_parts ? kDecodedK : k)) / kPanel));
  int64_t size = parts(panels, parts(panels, most)), down = std::max(threads, std::min(4 * threads, call.m / 128));
  if (call.m < 4 * call.n) {
    const auto of_one_thread = [&](int64_t columns) { return parts(parts(panels, columns), threads) * columns; };
    size = most;
    for (int64_t other = most; other > 0; --other) {
      if (of_one_thread(other) < of_one_thread(size)) size = other;
    }
    down = std::max<int64_t>(1, std::min(parts(threads, parts(panels, size)), call.m / 128));
  }
  if (in_parts) down = std::max(down, parts(call.m, kWaitingRows));
  call.task_columns = size * kPanel;
  call.task_rows = parts(parts(call.m, down), kPanel) * kPanel;
}

}  // namespace

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
  shape.back() = parts(n, block_size);
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
  if (isa) set_task(call, k * taps);
}

}  // namespace pt2mx
