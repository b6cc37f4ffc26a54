// What the kernels offer: functions over contiguous tensors, given as pointers, on torch's threads. The modules of the
// folder above fill the structs, field by field the same, and so do the operators of pt2mx/cpp.

#pragma once

#include <cstdint>

// torch's own (torch/csrc/stable/c/shim.h), so that its settings and its pool of threads serve here.
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, void (*work)(int64_t, int64_t, void*),
                               void* context);

// An element format and the modes, as ../quantize.py fills it.
struct Spec {
  const int32_t* exponent_offsets;  // of an exponent: `candidates` changes of it
  int32_t bits, mantissa_bits, emin, emax, max_code, is_int, full_range;
  int32_t rounding, threshold, candidates, searches, error_bits;
  int32_t codes_per_group, bytes_per_group;
  float max_normal, lowest;
};

// As ../quantize.py fills it. The tensor is (outer, n, inner), with blocks along n.
struct Call {
  const Spec* spec;
  int32_t operation, dtype, out_dtype, grad_bytes;  // out_dtype: of the values of FAKE_QUANTIZE and DEQUANTIZE
  int64_t outer, n, inner, block;
  const void* x;     // values, or the codes of DEQUANTIZE
  const void* grad;  // CLIP_GRADIENT
  void* out;         // values, or the codes of QUANTIZE
  uint8_t* scale;    // written by QUANTIZE, read by DEQUANTIZE
  uint64_t seed;
};

// What is made of a product before it is stored: the sum with a residual, an activation, and that quantized in blocks
// along the rows, in `out_dtype`.
struct Epilogue {
  const Spec* spec;
  int32_t activation, out_dtype;
  int64_t block;
  const void* residual;  // as the product, or null
  void* activated;       // where the activation goes, in the dtype of the product; or null
};

// A product of x: (m, k) with a weight (n, k) that is packed along k, as ../linear.py fills it.
struct LinearCall {
  const float* table;                                                               // of the 256 codes
  int32_t format, bits, codes_per_group, bytes_per_group, dtype, out_dtype, units;  // bias has out_dtype too
  int64_t m, n, k, block;
  int64_t task_rows, task_columns;  // of the result, where there are units
  int64_t row_bytes, row_blocks;
  int64_t rotation;  // values of x that are rotated together first; 0: none
  const void* x;
  const uint8_t* data;
  const uint8_t* scale;
  const void* bias;          // or null
  const Epilogue* epilogue;  // or null; `can_finish` in linear.cpp says which are served
  void* out;
};

// A convolution of x: (images, size, k) as a product, as ../convolution.py fills it: (height, width) each. A row of the
// weight is that of one tap after the other, each packed by itself; `m` counts the places of the results of all images.
struct ConvolutionCall {
  LinearCall linear;
  int64_t pixels;  // of x, in all images
  int64_t size[2], out_size[2], kernel[2], stride[2], padding[2], dilation[2];
};

// As ../attention.py fills it. Tensors but the mask are contiguous; strides of that are in bytes.
struct AttentionCall {
  const float* table;
  int32_t format, dtype;
  int64_t heads, queries, group, slots, width, value_width, block, value_block;
  int64_t key_bytes, key_blocks, value_bytes, value_blocks;  // of a row
  int64_t mask_batch, mask_head, mask_query, mask_slot;
  float factor;
  int64_t pairs;  // sequences times heads of the keys
  const void* query;
  const uint8_t *key, *key_scale, *value, *value_scale;
  const uint8_t* mask;  // or null
  void* out;
  int32_t* invalid;  // set to 1 where a code is one that cannot be decoded
};

// x: (first, second, m, k) times y: (first, second, k, n) in fp32, as ../bfloat16_products.py fills it: values that a
// bfloat16 holds. Strides of these are in values; of the last two dimensions of y, and of x the last, one is 1.
struct MatmulCall {
  int32_t units;
  int64_t threads, first, second, m, n, k;
  int64_t x_stride[3], y_stride[4];
  const float *x, *y;
  float* out;  // contiguous
};

// Attention: query (batch, heads, queries, width), key (batch, heads / group, keys, width), value (batch, heads /
// group, keys, value_width), all in bfloat16 or all in fp32, as ../bfloat16_products.py fills it: values of the query
// and the key that a bfloat16 holds. Strides are in values, and 1 along the last dimension; out is (batch, queries,
// heads, value_width) in the same dtype.
struct DenseAttentionCall {
  int32_t units, causal, dtype;
  int64_t threads, batch, heads, group, queries, keys, width, value_width;
  int64_t query_stride[3], key_stride[3], value_stride[3], mask_stride[3];
  float factor;
  const void *query, *key, *value;
  const uint8_t* seen;       // a mask of booleans, or null
  const void* added;         // a mask that is added, in the same dtype, or null
  const Epilogue* epilogue;  // or null: blocks of 32 values, of which value_width is a multiple
  void* out;
};

// As ../hadamard.py fills it.
struct HadamardCall {
  int32_t dtype;
  int64_t outer, n, inner, size;
  const void* x;
  void* out;
};

// Rows of x that are activated, or normed with what is added to them, and quantized, as ../activations.py fills it.
// Weight and bias: (n).
struct ActivationCall {
  const Spec* spec;
  int32_t activation, is_norm, dtype, out_dtype, weight_dtype, bias_dtype;
  float eps;
  int64_t rows, n, block;
  const void *x, *residual, *weight, *bias;  // but x: or null
  void* normed;                              // or null
  void* out;
};

// What a function returns that has computed nothing; other numbers but 0 are torch's errors.
constexpr int32_t kUnserved = -1;

// Rows of x up to which products in vectors, which need no units, are no slower than a dense product.
constexpr int64_t kFewRows = 32;

// Units for products of many rows of bfloat16 values, in the order of preference: AMX; AVX512_VNNI, where the values
// are integers times powers of two; AVX512_BF16.
enum Unit { AMX = 1, AVX512_VNNI = 2, AVX512_BF16 = 4 };

enum Dtype { FP32, FP16, BF16 };
enum Operation { QUANTIZE, DEQUANTIZE, FAKE_QUANTIZE, CLIP_GRADIENT };

extern "C" {

int32_t pt2mx_run(const Call* call, ParallelFor parallel_for);
int32_t pt2mx_rotate_fake_quantize(const Call* call, int64_t size, ParallelFor parallel_for);
int32_t pt2mx_random_bits(uint64_t seed, int32_t* out, int64_t n, ParallelFor parallel_for);
int32_t pt2mx_linear(const LinearCall* call, ParallelFor parallel_for);
int32_t pt2mx_convolution(const ConvolutionCall* call, ParallelFor parallel_for);
int32_t pt2mx_has_tiles();                                // whether the processor has AMX
int32_t pt2mx_units(int32_t format, const float* table);  // that serve a weight, of a LinearCall's format and table
int32_t pt2mx_attention(AttentionCall* call, ParallelFor parallel_for);
int32_t pt2mx_bfloat16_units();  // that serve the next two
int32_t pt2mx_matmul(const MatmulCall* call, ParallelFor parallel_for);
int32_t pt2mx_dense_attention(const DenseAttentionCall* call, ParallelFor parallel_for);
int32_t pt2mx_quantize_activation(const ActivationCall* call, ParallelFor parallel_for);
int32_t pt2mx_hadamard(const HadamardCall* call, ParallelFor parallel_for);

}  // extern "C"
