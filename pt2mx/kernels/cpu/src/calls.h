// The interface of the kernels: functions over contiguous tensors, given as pointers, which run on torch's threads.
// ../calls.py reads the structures and the functions from this file: fields are numbers, pointers, arrays of these, or
// structures that are declared above. pt2mx/cpp fills the structures too.

#pragma once

#include <cstdint>

// torch_parallel_for of torch/csrc/stable/c/shim.h: uses torch's settings and its thread pool.
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, void (*work)(int64_t, int64_t, void*),
                               void* context);

// A scale format with a significand, and its mode; pt2mx/kernels/constants.py explains the fields.
struct FloatScale {
  const float* factors;         // multiply the quotient;
  const int32_t* code_offsets;  // are added to the code: each pair of both is a candidate of a search
  int32_t factor_count, offset_count;
  int32_t dtype;   // of stored scales: a Dtype, or BYTE
  int32_t tensor;  // the scale of the tensor, a TensorScale
  int32_t reciprocal, rounds_up;
  int32_t mantissa_bits, bias, emin, max_code, magnitude, sign, nan, smallest, largest;
  float unit, most, least, zero_below, zero, max_value;
};

// An element format and the modes.
struct Spec {
  const int32_t* exponent_offsets;  // that a search adds to an exponent: `candidates` of them
  const FloatScale* float_scale;    // null for E8M0
  int32_t bits, mantissa_bits, emin, emax, max_code, is_int, full_range;
  int32_t rounding, threshold, candidates, searches, error_bits;
  int32_t codes_per_group, bytes_per_group;
  float max_normal, lowest;
};

// Quantization of a tensor (outer, n, inner), with blocks along n.
struct QuantizeCall {
  const Spec* spec;
  int32_t operation, dtype, out_dtype, grad_bytes;  // out_dtype: of the values of FAKE_QUANTIZE and DEQUANTIZE
  int64_t outer, n, inner, block;
  const void* x;     // values; codes for DEQUANTIZE
  const void* grad;  // for CLIP_GRADIENT
  void* out;         // values; codes for QUANTIZE
  void* scale;       // written by QUANTIZE, read by DEQUANTIZE
  uint64_t seed;
  float tensor_scale;
  const int64_t* slots;          // of each `new_slots` rows of x, if any, QUANTIZE writes row i to row slots[i] of
  int64_t new_slots, all_slots;  // `all_slots` of the output
  const float* table;            // of DEQUANTIZE, as of LinearCall; null if `format` is 0
  int32_t format;
};

// What a kernel does with the result of a matmul before it stores it: it adds a residual, applies an activation, and
// quantizes in blocks along the rows, to `out_dtype`.
struct Epilogue {
  const Spec* spec;
  int32_t activation, out_dtype;
  int64_t block;
  const void* residual;  // in the shape and dtype of the matmul; or null
  void* activated;       // receives the activation before it is quantized, in the dtype of the matmul; or null
};

// The matmul of x: (m, k) and a weight (n, k) that is packed along k.
struct LinearCall {
  const float* table;                                                             // the values of 256 codes
  int32_t format, bits, codes_per_group, bytes_per_group, dtype, out_dtype, isa;  // out_dtype: of the bias too
  int32_t integer_isa;  // bits of IntegerIsa; 0: not to multiply integers
  int64_t m, n, k, block;
  int64_t task_rows, task_columns;  // of the result that a thread computes at a time (`pt2mx_set_tasks`)
  int64_t row_bytes, row_blocks;    // of the weight
  int64_t rotation;                 // size of the blocks of x that are rotated first; 0: none
  const void* x;
  const uint8_t* data;
  const uint8_t* scale;      // in the dtype of `float_scale`
  const void* bias;          // or null
  const Epilogue* epilogue;  // or null; `supports_epilogue` in linear.cpp says which
  void* out;
  const FloatScale* float_scale;  // null for E8M0
  float tensor_scale;
};

// The convolution of x: (images, height, width, k) as a matmul. A row of the weight has `k` values for each tap of the
// kernel, and each tap is packed separately. `m` counts the result's positions in all images. Pairs are (height,
// width).
struct ConvolutionCall {
  LinearCall linear;
  int64_t pixels;  // of x, in all images
  int64_t size[2], out_size[2], kernel[2], stride[2], padding[2], dilation[2];
};

// Attention over packed keys and values. All tensors but the mask are contiguous; the strides of the mask are in bytes.
struct AttentionCall {
  const float* table;
  const FloatScale* float_scale;  // null for E8M0
  int32_t format, dtype, isa;
  int32_t invalid;  // set to 1 if a code cannot be decoded
  int64_t heads, queries, group, slots, width, value_width, block, value_block;
  int64_t key_bytes, key_blocks, value_bytes, value_blocks;  // of a row
  int64_t mask_batch, mask_head, mask_query, mask_slot;      // strides
  float factor, key_tensor_scale, value_tensor_scale;        // factor: of the scores
  int64_t pairs;                                             // sequences times heads of the keys
  const void* query;
  const uint8_t *key, *key_scale, *value, *value_scale;  // scales in the dtype of `float_scale`
  const uint8_t* mask;                                   // or null
  void* out;
};

// The batched matmul of x: (first, second, m, k) and y: (first, second, k, n) in fp32 with values that bfloat16
// represents. Strides are in values; the last one of x is 1, and so is one of the last two of y.
struct MatmulCall {
  int32_t isa;
  int64_t threads, first, second, m, n, k;
  int64_t x_stride[3], y_stride[4];
  const float *x, *y;
  float* out;  // contiguous
};

// Attention of query (batch, heads, queries, width), key (batch, heads / group, keys, width) and value (batch, heads /
// group, keys, value_width), all in bfloat16, or all in fp32 with a query and keys that bfloat16 represents. Strides
// are in values, and the last one is 1; out is (batch, queries, heads, value_width) in the same dtype.
struct DenseAttentionCall {
  int32_t isa, causal, dtype;
  int64_t threads, batch, heads, group, queries, keys, width, value_width;
  int64_t query_stride[3], key_stride[3], value_stride[3], mask_stride[3];
  float factor;
  const void *query, *key, *value;
  const uint8_t* bool_mask;   // or null
  const void* additive_mask;  // in the same dtype; or null
  const Epilogue* epilogue;   // or null; value_width is then a multiple of its blocks of 32 values
  void* out;
};

struct HadamardCall {
  int32_t dtype;
  int64_t outer, n, inner, size;
  const void* x;
  void* out;
};

// Columns of weights, (groups, width, n), that GPTQ rounds one after the other.
struct GptqPanelCall {
  const Spec* spec;
  int64_t groups, width, n;
  const float* columns;
  const float* shares;  // (groups, width, width): row i has what column i makes up for of each error before it
  const float* scale;   // what multiplies the element of each value
  const float* low;     // the smallest value to which each is rounded; or null
  const float* high;    // the largest
  float* rounded;
  float* errors;
};

// Sums over the blocks of quantized values that have a scale; `nonfinite` over all.
struct ErrorSums {
  int64_t nonfinite, saturated, flushed;
  double signal, noise;
};

// x, the results y of its quantization, and the scale of each block; low, high: the elements' ends. Adds to `sums`.
struct ErrorSumsCall {
  int32_t dtype;
  float low, high;
  int64_t outer, n, inner, block;
  const void *x, *y;
  const float* scale;
  ErrorSums* sums;
};

// An activation of rows of x, or the layer norm of x plus a residual, quantized. Weight and bias: (n).
struct ActivationCall {
  const Spec* spec;
  int32_t activation, is_norm, dtype, out_dtype, weight_dtype, bias_dtype;
  float eps;
  int64_t rows, n, block;
  const void *x, *residual, *weight, *bias;  // only x must not be null
  void* normed;                              // receives the norm before it is quantized; or null
  void* out;
};

// A call of a kernel, whose arguments are pointers and integers of 64 bits.
constexpr int kMostArguments = 48;
struct RecordedCall {
  void* kernel;
  int64_t returns_error;  // whether the kernel returns int32_t, an error unless it is 0
  uint64_t arguments[kMostArguments];
};

// Returned by a function that does not support a call and computed nothing. All other numbers except 0 are errors of
// torch.
constexpr int32_t kUnsupported = -1;

// The matmul of x: (batch, m, k) and other: (batch, k, n), contiguous, with products that are added in a Register, to
// out: (batch, m, n). integer_bits are of FIXED, fraction_bits of FIXED and HOPPER.
struct AccumulatedCall {
  int32_t kind, integer_bits, fraction_bits;
  int64_t batch, m, n, k, group, promotion;
  const float *x, *other;
  float* out;
};

// Most rows of x for which kernels in fp32 vectors, which need no matrix instructions, are as fast as a dense matmul.
constexpr int64_t kFewRows = 32;
// Most rows of x for which they are faster than matrix instructions.
constexpr int64_t kVectorRows = 4;

// Instruction sets for GEMMs of bfloat16 values, in the order of preference. INT8 stands for any of IntegerIsa, which
// multiply only values that are integers of 8 bits times powers of two.
enum Isa { AMX = 1, INT8 = 2, AVX512_BF16 = 4 };

// Instructions for such integers: VPMADDUBSW of AVX2 and AVX-512, VPDPBUSD of AVX_VNNI and AVX512_VNNI, TDPBSSD of AMX,
// SDOT of AArch64's FEAT_DotProd, and besides VPDPBUSD, VPERMB of AVX512_VBMI, which looks up codes of 4 bits.
enum IntegerIsa { VPMADDUBSW = 1, VPDPBUSD = 2, TDPBSSD = 4, SDOT = 8, VPERMB = 16 };

enum Dtype { FP32, FP16, BF16, BYTE };
enum TensorScale { NO_TENSOR_SCALE, FACTOR, DIVISOR };
enum RegisterKind { FP32_REGISTER, BF16_REGISTER, FP16_REGISTER, FIXED, HOPPER };
enum Operation { QUANTIZE, DEQUANTIZE, FAKE_QUANTIZE, CLIP_GRADIENT };

extern "C" {

int32_t pt2mx_run(const QuantizeCall* call, ParallelFor parallel_for);
int32_t pt2mx_rotate_fake_quantize(const QuantizeCall* call, int64_t size, ParallelFor parallel_for);
int32_t pt2mx_dequantize_rows(const QuantizeCall* call, ParallelFor parallel_for);
// Quantizes new keys and values into slots of a cache; kUnsupported if a slot does not exist.
int32_t pt2mx_store(const QuantizeCall* calls, int64_t count, ParallelFor parallel_for);
int32_t pt2mx_random_bits(uint64_t seed, int32_t* out, int64_t n, ParallelFor parallel_for);
int32_t pt2mx_linear(const LinearCall* call, ParallelFor parallel_for);
// The same with other pointers than those of the call, which it does not change.
int32_t pt2mx_linear_of(const LinearCall* call, const void* x, const uint8_t* data, const uint8_t* scale,
                        const void* bias, void* out, ParallelFor parallel_for);
int32_t pt2mx_convolution(const ConvolutionCall* call, ParallelFor parallel_for);
int32_t pt2mx_isa(int32_t format, const float* table);          // bits of Isa that a weight of a LinearCall can use
int32_t pt2mx_integer_isa(int32_t format, const float* table);  // the same of IntegerIsa
int32_t pt2mx_isa_of_rows(int32_t isa, int32_t dtype, int64_t rows);  // those of them for x of a dtype; 0: vectors
// Sets the tasks of a call with an `isa`. taps: pixels of x, k values each, that a row of the weight multiplies.
void pt2mx_set_tasks(LinearCall* call, int64_t taps, int64_t threads);
int32_t pt2mx_attention(AttentionCall* call, ParallelFor parallel_for);
// The same with other pointers, and with a contiguous mask or null; the call is one with one slot. kUnsupported if a
// code cannot be decoded.
int32_t pt2mx_attention_of(const AttentionCall* call, int64_t slots, const void* query, const uint8_t* key,
                           const uint8_t* key_scale, const uint8_t* value, const uint8_t* value_scale,
                           const uint8_t* mask, void* out, ParallelFor parallel_for);
// The same over keys and values in the dtype of the query.
int32_t pt2mx_decoding_attention_of(const AttentionCall* call, int64_t slots, const void* query, const void* keys,
                                    const void* values, const uint8_t* mask, void* out, ParallelFor parallel_for);
int32_t pt2mx_bf16_isa();  // bits of Isa that the next two can use
int32_t pt2mx_matmul(const MatmulCall* call, ParallelFor parallel_for);
int32_t pt2mx_dense_attention(const DenseAttentionCall* call, ParallelFor parallel_for);
int32_t pt2mx_quantize_activation(const ActivationCall* call, ParallelFor parallel_for);
int32_t pt2mx_quantize_activation_of(const ActivationCall* call, const void* x, void* out, ParallelFor parallel_for);
int32_t pt2mx_hadamard(const HadamardCall* call, ParallelFor parallel_for);
int32_t pt2mx_gptq_panel(const GptqPanelCall* call, ParallelFor parallel_for);
int32_t pt2mx_accumulated_matmul(const AccumulatedCall* call, ParallelFor parallel_for);
int32_t pt2mx_error_sums(const ErrorSumsCall* call, ParallelFor parallel_for);
// Returns how many of the calls ran: less than n where a kernel returned an error or threw an exception.
int64_t pt2mx_replay(const RecordedCall* calls, int64_t n);

}  // extern "C"
