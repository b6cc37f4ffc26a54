// attention_mx and decoding_attention: a few queries over packed keys and values, or over floats; built and called by
// ../attention.py.
//
// A head of the keys has a group of query heads. A kernel keeps their scores for all slots, so that it knows a slot's
// softmax weight when it decodes the slot's value. Each sum is computed by one thread in one order.

#include <type_traits>

#include "attention_amx.h"
#include "attention_fp32.h"

namespace {

template <class Decoder>
void run(i64 begin, i64 end, void* context) {
  const PackedAttention& attention = *static_cast<const PackedAttention*>(context);
  const KeepSubnormals keep;
  for (i64 pair = begin; pair < end; ++pair) HeadFp32<Decoder>(attention, pair, 0, attention.rows).run();
}

// Returns a copy, because other threads may share the call. It has strides of a mask with one slot.
AttentionCall with_pointers(AttentionCall call, i64 slots, const void* query, const u8* key, const u8* value,
                            const u8* mask, void* out) {
  call.slots = slots;
  for (int64_t* stride : {&call.mask_batch, &call.mask_head, &call.mask_query}) *stride *= slots;
  call.query = query;
  call.key = key;
  call.value = value;
  call.mask = mask;
  call.out = out;
  return call;
}

}  // namespace

extern "C" {

int32_t pt2mx_attention(AttentionCall* call, ParallelFor parallel_for) {
  int32_t error = 0;
  PackedAttention attention(*call);
  with_decoder(call->format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    // A processor without a decoder in registers uses the definition.
    if constexpr (std::is_same_v<Decoder, Decoded>) {
      call->invalid = 1;
    } else {
      auto work = run<Decoder>;
#if defined(PT2MX_HAVE_MATRIX_ISA)
      if (call->isa & AMX) work = run_attention_amx<Decoder>;
#endif
      error = parallel_for(0, call->pairs, 1, work, &attention);
    }
  });
  return error;
}

int32_t pt2mx_attention_of(const AttentionCall* call, int64_t slots, const void* query, const uint8_t* key,
                           const uint8_t* key_scale, const uint8_t* value, const uint8_t* value_scale,
                           const uint8_t* mask, void* out, ParallelFor parallel_for) {
  AttentionCall own = with_pointers(*call, slots, query, key, value, mask, out);
  own.key_scale = key_scale;
  own.value_scale = value_scale;
  const int32_t error = pt2mx_attention(&own, parallel_for);
  return own.invalid ? kUnsupported : error;
}

int32_t pt2mx_decoding_attention_of(const AttentionCall* call, int64_t slots, const void* query, const void* keys,
                                    const void* values, const uint8_t* mask, void* out, ParallelFor parallel_for) {
  const auto *key = static_cast<const u8*>(keys), *value = static_cast<const u8*>(values);
  AttentionCall own = with_pointers(*call, slots, query, key, value, mask, out);
  PackedAttention attention(own);
  constexpr decltype(&run<Dense<FP32>>) kRuns[] = {run<Dense<FP32>>, run<Dense<FP16>>, run<Dense<BF16>>};
  return parallel_for(0, own.pairs, 1, kRuns[own.dtype], &attention);
}

}  // extern "C"
