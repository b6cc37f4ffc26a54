// linear_mx and grouped_linear_mx: as pt2mx/kernels/cpu/linear.py has them, with the same choice of kernel.

#include "tensors.h"

namespace pt2mx {
namespace {

constexpr int64_t kFewRows = 4, kSomeRows = 32, kPanel = 256, kManyRows = 64;

// How many times 32 rows of the weight go together.
int32_t tiles_of(int64_t rows, int64_t n) {
  if (rows <= kManyRows) return 1;
  const int64_t threads = torch::stable::get_num_threads();
  return int32_t(std::max<int64_t>(1, std::min<int64_t>(8, n / (64 * threads))));
}

}  // namespace

Tensor linear(const Tensor& given, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& name, int64_t block_size, int64_t rotation) {
  const Element& element = element_of(name);
  STD_TORCH_CHECK(given.dim() > 0 && data.dim() == 2, "linear_mx takes (..., K) and a weight of two dimensions");
  Shape shape = shape_of(given);
  const int64_t k = shape.back(), rows = product(shape, 0, shape.size() - 1), n = data.size(0);
  check_packed(data, scale, element, block_size, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == given.scalar_type()),
                  "linear_mx: the bias does not fit");
  Tensor x = given;
  if (rotation && (rows > kFewRows || !rows)) {  // on all threads
    x = hadamard(x, rotation, -1);
    rotation = 0;
  }
  const Blocks blocks = blocks_of(element, block_size, k);
  const Dtype dtype = dtype_of(x);
  const bool tiled = rows > kFewRows && dtype == BF16 && blocks.decoder && pt2mx_has_tiles();
  if (!x.numel() || !n || (rows > kSomeRows && !tiled)) {
    return call("aten::linear", x, dequantize(data, scale, element, block_size, x.scalar_type(), k), bias);
  }
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, x.scalar_type());
  const Tensor values = dense(x), codes = dense(data), scales = dense(scale);
  const std::optional<Tensor> added = bias ? std::optional(dense(*bias)) : std::nullopt;
  LinearCall call{};
  call.table = table_of(element);
  call.format = blocks.decoder;
  call.bits = element.bits;
  call.codes_per_group = element.codes_per_group;
  call.bytes_per_group = element.bytes_per_group;
  call.dtype = dtype;
  call.n = n;
  call.k = k;
  call.block = blocks.size;
  call.row_bytes = data.size(1);
  call.row_blocks = scale.size(1);
  call.rotation = rotation;
  call.data = static_cast<const uint8_t*>(codes.const_data_ptr());
  call.scale = static_cast<const uint8_t*>(scales.const_data_ptr());
  call.bias = added ? added->const_data_ptr() : nullptr;
  const int64_t bytes = dtype == FP32 ? 4 : 2;
  for (int64_t row = 0; row < rows; row += kPanel) {
    call.m = std::min(kPanel, rows - row);
    call.tiles = tiled ? tiles_of(call.m, n) : 0;
    call.x = static_cast<const char*>(values.const_data_ptr()) + row * k * bytes;
    call.out = static_cast<char*>(out.mutable_data_ptr()) + row * n * bytes;
    check_served(pt2mx_linear(&call, torch_parallel_for));
  }
  return out;
}

Tensor grouped_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const Tensor& offs,
                      const std::string& element, int64_t block_size) {
  STD_TORCH_CHECK(x.dim() == 2 && data.dim() == 3 && scale.dim() == 3, "grouped_linear_mx takes (T, K) and (E, N, K)");
  STD_TORCH_CHECK(offs.scalar_type() == ScalarType::Int && shape_of(offs) == Shape{data.size(0)},
                  "grouped_linear_mx takes an end of rows for each expert");
  const Tensor ends = dense(offs);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  Tensor out = torch::stable::empty({x.size(0), data.size(1)}, x.scalar_type());
  torch::stable::zero_(out);
  for (int64_t expert = 0, first = 0; expert < data.size(0); first = end[expert++]) {
    const int64_t rows = end[expert] - first;
    if (rows <= 0) continue;
    Tensor at = x, to = out;
    const Tensor y = linear(torch::stable::narrow(at, 0, first, rows), torch::stable::select(data, 0, expert),
                            torch::stable::select(scale, 0, expert), std::nullopt, element, block_size, 0);
    Tensor place = torch::stable::narrow(to, 0, first, rows);
    torch::stable::copy_(place, y);
  }
  return out;
}

}  // namespace pt2mx
