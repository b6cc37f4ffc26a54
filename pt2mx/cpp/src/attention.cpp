// attention_mx: as pt2mx/kernels/cpu/attention.py has it, with the same choice of kernel.

#include <algorithm>
#include <cmath>

#include "packed_weight.h"

namespace pt2mx {
namespace {

constexpr int64_t kFewQueries = 32, kFewForAmx = 64, kMaxWidth = 512, kGroup = 32;

const uint8_t* bytes_of(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }

// Returns the stride of dimension d of the mask, broadcast to all sequences, heads and queries.
int64_t expanded(const Tensor& mask, int64_t d) { return mask.size(d) == 1 ? 0 : mask.stride(d); }

}  // namespace

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& key_scale, const Tensor& value,
                 const Tensor& value_scale, const std::string& element, int64_t block_size, int64_t value_width,
                 const std::optional<Tensor>& mask, const std::optional<double>& scale,
                 const std::optional<std::string>& scale_format, const std::optional<Tensor>&,
                 const std::optional<Tensor>&) {
  check_scales(scale_format);
  const PackedWeight keys{key, key_scale, element_of(element), block_size};
  const PackedWeight values{value, value_scale, keys.element, block_size};
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && (!mask || mask->dim() == 4),
                  "attention_mx takes tensors of four dimensions");
  STD_TORCH_CHECK(!mask || mask->scalar_type() == ScalarType::Bool, "attention_mx takes a mask of booleans");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t key_heads = key.size(1), slots = key.size(2);
  check_packed(keys, width);
  check_packed(values, value_width);
  STD_TORCH_CHECK(key.size(0) == batch && (key_heads ? heads % key_heads == 0 : heads == 0) && value.size(0) == batch &&
                      value.size(1) == key_heads && value.size(2) == slots,
                  "attention_mx: the query does not fit the keys and values");

  const auto attend = [&] {
    const Tensor k = dequantize(keys, query.scalar_type(), width);
    const Tensor v = dequantize(values, query.scalar_type(), value_width);
    const bool grouped = heads != key_heads;
    return dense(call("aten::scaled_dot_product_attention", query, k, v, mask, 0.0, false, scale, grouped));
  };
  const Blocks key_blocks = keys.blocks(width), value_blocks = values.blocks(value_width);
  const bool whole = width % kGroup == 0 && value_width % kGroup == 0 && std::max(width, value_width) <= kMaxWidth;
  if (!key_blocks.decoder || !value_blocks.decoder || !whole || !query.numel() || !slots) return attend();
  const int64_t group = heads / key_heads;
  const int32_t isa = pt2mx_isa(key_blocks.decoder, table_of(keys.element)) & AMX;
  if (group * queries > (isa ? kFewForAmx : kFewQueries)) return attend();

  Tensor out = torch::stable::empty({batch, heads, queries, value_width}, query.scalar_type());
  const Tensor q = dense(query), k = dense(key), ks = dense(key_scale);
  const Tensor v = dense(value), vs = dense(value_scale);
  AttentionCall call{};
  call.table = table_of(keys.element);
  call.format = key_blocks.decoder;
  call.dtype = dtype_of(query);
  call.isa = isa;
  call.heads = key_heads;
  call.queries = queries;
  call.group = group;
  call.slots = slots;
  call.width = width;
  call.value_width = value_width;
  call.block = key_blocks.size;
  call.value_block = value_blocks.size;
  call.key_bytes = key.size(3);
  call.key_blocks = key_scale.size(3);
  call.value_bytes = value.size(3);
  call.value_blocks = value_scale.size(3);
  call.factor = float(scale ? *scale : std::pow(double(width), -0.5));
  call.pairs = batch * key_heads;
  call.query = q.const_data_ptr();
  call.key = bytes_of(k);
  call.key_scale = bytes_of(ks);
  call.value = bytes_of(v);
  call.value_scale = bytes_of(vs);
  if (mask) {
    call.mask = bytes_of(*mask);
    call.mask_batch = expanded(*mask, 0);
    call.mask_head = expanded(*mask, 1);
    call.mask_query = expanded(*mask, 2);
    call.mask_slot = expanded(*mask, 3);
  }
  call.out = out.mutable_data_ptr();
  check_error(pt2mx_attention(&call, torch_parallel_for));
  return call.invalid ? attend() : out;
}

}  // namespace pt2mx
