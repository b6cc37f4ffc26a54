// linear_mx and grouped_linear_mx: as pt2mx/kernels/cpu/linear.py has them, with the same choice of kernel.

#include "products.h"

namespace pt2mx {
namespace {

constexpr int64_t kVectorRows = 4, kDecoded = 1 << 20;

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How many rows and columns of the result one thread computes at a time.
void set_task(LinearCall& call, int64_t k) {
  const int64_t threads = torch::stable::get_num_threads(), panels = parts(call.n, 32);
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(32, kDecoded / (2 * k) / 32));
  int64_t size = parts(panels, parts(panels, most)), down = std::max(threads, std::min(4 * threads, call.m / 128));
  if (call.m < 4 * call.n) {
    const auto of_one_thread = [&](int64_t columns) { return parts(parts(panels, columns), threads) * columns; };
    size = most;
    for (int64_t other = most; other > 0; --other) {
      if (of_one_thread(other) < of_one_thread(size)) size = other;
    }
    down = std::max<int64_t>(1, std::min(parts(threads, parts(panels, size)), call.m / 128));
  }
  call.task_columns = size * 32;
  call.task_rows = parts(parts(call.m, down), 32) * 32;
}

// Whether bfloat16 holds all values of x: contiguous.
bool are_bfloats(const Tensor& x) {
  const auto* bits = static_cast<const uint32_t*>(x.const_data_ptr());
  return std::all_of(bits, bits + x.numel(), [](uint32_t value) { return !(value & 0xFFFF); });
}

}  // namespace

LinearCall call_of(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
                   Tensor& out, const Element& element, int64_t block_size, int32_t isa, int64_t taps) {
  const int64_t k = x.size(-1), n = out.size(-1);
  const Blocks blocks = blocks_of(element, block_size, k);
  LinearCall call{};
  call.table = table_of(element);
  call.format = blocks.decoder;
  call.bits = element.bits;
  call.codes_per_group = element.codes_per_group;
  call.bytes_per_group = element.bytes_per_group;
  call.dtype = dtype_of(x);
  call.out_dtype = dtype_of(out);
  call.isa = isa;
  call.m = out.numel() / n;
  call.n = n;
  call.k = k;
  call.block = blocks.size;
  call.row_bytes = data.numel() / n;
  call.row_blocks = scale.numel() / n;
  call.x = x.const_data_ptr();
  call.data = static_cast<const uint8_t*>(data.const_data_ptr());
  call.scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  if (isa) set_task(call, k * taps);
  return call;
}

Tensor linear(const Tensor& given, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& bias,
              const std::string& name, int64_t block_size, int64_t rotation,
              const std::optional<ScalarType>& target_dtype) {
  const Element& element = element_of(name);
  STD_TORCH_CHECK(given.dim() > 0 && data.dim() == 2, "linear_mx takes (..., K) and a weight of two dimensions");
  Shape shape = shape_of(given);
  const int64_t k = shape.back(), rows = product(shape, 0, shape.size() - 1), n = data.size(0);
  const ScalarType result = target_dtype.value_or(given.scalar_type());
  check_packed(data, scale, element, block_size, k);
  STD_TORCH_CHECK(!bias || (bias->numel() == n && bias->scalar_type() == result), "linear_mx: the bias does not fit");
  Tensor x = given;
  if (rotation && (rows > kVectorRows || !rows)) {  // on all threads
    x = hadamard(x, rotation, -1);
    rotation = 0;
  }
  const auto dense_product = [&] {
    const Tensor weight = dequantize(data, scale, element, block_size, result, k);
    return call("aten::linear", result == x.scalar_type() ? x : torch::stable::to(x, result), weight, bias);
  };
  const Blocks blocks = blocks_of(element, block_size, k);
  const int32_t isa = dtype_of(x) == BF16 && rows > kVectorRows ? pt2mx_isa(blocks.decoder, table_of(element)) : 0;
  if (!x.numel() || !n || (rows > kFewRows && !isa)) return dense_product();
  shape.back() = n;
  Tensor out = torch::stable::empty(shape, result);
  const Tensor values = dense(x), codes = dense(data), scales = dense(scale);
  const std::optional<Tensor> added = bias ? std::optional(dense(*bias)) : std::nullopt;
  LinearCall call = call_of(values, codes, scales, added, out, element, block_size, isa);
  call.rotation = rotation;
  const int32_t error = pt2mx_linear(&call, torch_parallel_for);
  if (error == kUnsupported) return dense_product();
  check_served(error);
  return out;
}

Tensor grouped_linear(const Tensor& given, const Tensor& data, const Tensor& scale, const Tensor& offs,
                      const std::string& name, int64_t block_size, const std::optional<ScalarType>& target_dtype) {
  STD_TORCH_CHECK(given.dim() == 2 && data.dim() == 3 && scale.dim() == 3,
                  "grouped_linear_mx takes (T, K) and (E, N, K)");
  STD_TORCH_CHECK(offs.scalar_type() == ScalarType::Int && shape_of(offs) == Shape{data.size(0)},
                  "grouped_linear_mx takes an end of rows for each expert");
  const Tensor ends = dense(offs);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  const ScalarType result = target_dtype.value_or(given.scalar_type());
  const Element& element = element_of(name);
  Tensor x = dense(given);
  const Blocks blocks = blocks_of(element, block_size, x.size(1));
  const bool many = dtype_of(x) == FP32 && result == ScalarType::Float && x.size(0) > kFewRows;
  if (many && pt2mx_isa(blocks.decoder, table_of(element)) && are_bfloats(x)) {
    x = torch::stable::to(x, ScalarType::BFloat16);
  }
  Tensor out = torch::stable::empty({x.size(0), data.size(1)}, result);
  torch::stable::zero_(out);
  for (int64_t expert = 0, first = 0; expert < data.size(0); first = end[expert++]) {
    const int64_t rows = end[expert] - first;
    if (rows <= 0) continue;
    Tensor at = x, to = out;
    const Tensor y = linear(torch::stable::narrow(at, 0, first, rows), torch::stable::select(data, 0, expert),
                            torch::stable::select(scale, 0, expert), std::nullopt, name, block_size, 0, result);
    Tensor place = torch::stable::narrow(to, 0, first, rows);
    torch::stable::copy_(place, y);
  }
  return out;
}

}  // namespace pt2mx
