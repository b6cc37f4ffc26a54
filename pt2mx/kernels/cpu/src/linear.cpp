// linear_mx, conv2d_mx: x times a packed weight; built and called by ../linear.py and ../convolution.py.
//
// The kernels, by the number of rows of x and the instructions that the processor has:
//
//   up to 4 rows of integers * 2**n    dot_int8.h        AVX2, AVX_VNNI, AVX512_VNNI or AArch64's SDOT
//   up to 32 rows of these             linear_int8.h     AVX2, AVX_VNNI, AVX512_VNNI or AMX
//   1 row in bfloat16, AVX512_BF16     gemv_bf16.h       codes of 4 and 6 bits become bfloat16 by a table
//   up to 32 rows                      linear_nibbles.h  codes of 4 bits become fp32 by a table
//   up to 32 rows, AMX                 linear_amx.h      the weight is decoded to bfloat16 as it is multiplied
//   up to 32 rows                      linear_fp32.h     any format, in fp32 vectors
//   more rows in bfloat16              gemm_bf16.h       AMX or AVX512_BF16, some columns are decoded first
//   more rows of integers * 2**n       gemm_int8.h       AVX2, AVX_VNNI or AVX512_VNNI, if there is no AMX
//
// One thread computes each sum, in one order, so results do not depend on the number of threads.

#include <type_traits>

#include "conv_small_channels.h"
#include "dot_int8.h"
#include "gemm_bf16.h"
#include "gemm_int8.h"
#include "gemv_bf16.h"
#include "linear_amx.h"
#include "linear_fp32.h"
#include "linear_int8.h"
#include "linear_nibbles.h"
#include "rotate.h"

namespace {

constexpr i64 kGrain = 1 << 18;    // multiplications that are worth another thread
constexpr i64 kDecoded = 1 << 20;  // bytes of the decoded weight that a thread handles at a time, for its L2 cache
// The most values of K that AMX decodes at a time, and the most rows of x whose sums wait for the next ones.
constexpr i64 kDecodedK = 2048, kWaitingRows = 1024;

// True without an epilogue, or if the GEMM kernels support it: blocks must be the 32 columns of a micro-tile.
bool supports_epilogue(const LinearCall& c) {
  if (!c.epilogue) return true;
  const Epilogue& e = *c.epilogue;
  return c.isa && c.m > kFewRows && c.out_dtype != FP16 && e.block == kGroup && c.n % kGroup == 0 &&
         e.spec->bits <= 8 && VecQuantizer::supports(*e.spec, e.block, c.n);
}

// The kernels on matrix instructions return kUnsupported if they computed nothing. `many_rows`: more than kFewRows.
#if defined(PT2MX_HAVE_MATRIX_ISA)

template <class Decoder>
int32_t multiply_bf16(Linear& linear, bool many_rows, ParallelFor parallel_for) {
  if (!(linear.call.isa & (many_rows ? AMX | AVX512_BF16 : AMX))) return kUnsupported;
  return many_rows ? gemm_bf16<Decoder>(linear, parallel_for) : linear_amx<Decoder>(linear, parallel_for);
}

// Multiplies up to kFewRows rows without AMX, or a number of rows for which AMX takes longer.
template <class Decoder>
int32_t multiply_few_rows(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  const auto in_bf16 = [&] {
    using Pairs = typename Bf16DecoderOf<Decoder>::type;
    if constexpr (!std::is_void<Pairs>::value) {
      if (supports_gemv(linear.call)) return gemv_bf16<Pairs, Decoder>(linear, tiles, grain, parallel_for);
    }
    return kUnsupported;
  };
  int32_t error = has_fast_avx512_bf16() ? in_bf16() : kUnsupported;
  if (error == kUnsupported) error = linear_nibbles<Decoder>(linear, tiles, grain, parallel_for);
  return error == kUnsupported && !has_fast_avx512_bf16() ? in_bf16() : error;
}

#else

template <class Decoder>
int32_t multiply_bf16(Linear&, bool, ParallelFor) {
  return kUnsupported;
}
template <class Decoder>
int32_t multiply_few_rows(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  return linear_nibbles<Decoder>(linear, tiles, grain, parallel_for);
}
int32_t conv_small_channels(const ConvolutionCall&, ParallelFor) { return kUnsupported; }

#endif

// Multiplies on INT8, which is slower than AMX, or on matrix instructions for bfloat16.
template <class Decoder>
int32_t multiply_on_isa(Linear& linear, bool many_rows, ParallelFor parallel_for) {
  const int32_t isa = linear.call.isa;
  const bool integers = ~isa & AMX && isa & INT8;
  const int32_t error = integers ? gemm_int8<Decoder>(linear, parallel_for) : kUnsupported;
  return error == kUnsupported ? multiply_bf16<Decoder>(linear, many_rows, parallel_for) : error;
}

// Multiplies a few rows of integers.
int32_t multiply_integers(const Linear& linear, ParallelFor parallel_for) {
  const LinearCall& c = linear.call;
  int32_t error = kUnsupported;
  if (!c.integer_isa || c.float_scale || c.m > kFewRows) return error;
  with_integer_decoder(c.format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    error = c.m <= kDotRows ? dot_int8<Decoder>(linear, parallel_for) : linear_int8<Decoder>(linear, parallel_for);
  });
  return error;
}

// Calls body(decoder) for formats whose codes are decoded in registers; others have no kernel on matrix instructions.
template <class Body>
void with_register_decoder(int32_t format, Body body) {
  with_decoder(format, [&](auto* decoder) {
    if constexpr (!std::is_same<std::remove_pointer_t<decltype(decoder)>, Decoded>::value) body(decoder);
  });
}

i64 parts(i64 n, i64 size) { return (n + size - 1) / size; }

int32_t multiply(LinearCall call, ParallelFor parallel_for) {
  if (!supports_epilogue(call)) return kUnsupported;
  std::vector<float> rotated;
  if (call.rotation) call.x = rotate_copy(call.rotation, call.dtype, call.x, call.m * call.k, rotated);
  Linear linear(call);
  int32_t error = multiply_integers(linear, parallel_for);
  if (error != kUnsupported) return error;
  with_decoder(call.format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    const i64 tiles = (call.n + kRows - 1) / kRows;
    const i64 grain = std::max<i64>(1, kGrain / (kRows * call.m * call.k));
    if constexpr (!std::is_same<Decoder, Decoded>::value) {
      const bool many_rows = call.m > kFewRows;
      if (!many_rows) error = multiply_few_rows<Decoder>(linear, tiles, grain, parallel_for);
      if (error == kUnsupported) error = multiply_on_isa<Decoder>(linear, many_rows, parallel_for);
      if (many_rows || error != kUnsupported) return;
    }
    prepare(linear, Decoder::kEvenOdd);
    error = parallel_for(0, tiles, grain, call.m == 1 ? run<Decoder, 1> : run<Decoder, 4>, &linear);
  });
  return error;
}

}  // namespace

extern "C" {

int32_t pt2mx_isa_of_rows(int32_t isa, int32_t dtype, int64_t rows) {
  if (rows <= kVectorRows) return 0;
  if (dtype == BF16) return isa;
  return dtype == FP32 && rows <= kFewRows ? isa & AMX : 0;  // as three bfloat16 values
}

int32_t pt2mx_integer_isa(int32_t format, const float* table) {
  int32_t isa = 0;
  with_integer_decoder(format,
                       [&](auto* decoder) { isa = integer_isa_for<std::remove_pointer_t<decltype(decoder)>>(table); });
  return isa;
}

int32_t pt2mx_isa(int32_t format, const float* table) {
  int32_t isa = 0;
  with_register_decoder(format, [&](auto*) { isa = pt2mx_bf16_isa() | (pt2mx_integer_isa(format, table) ? INT8 : 0); });
  return isa;
}

void pt2mx_set_tasks(LinearCall* call, int64_t taps, int64_t threads) {
  const i64 rows = call->m, n = call->n, groups = parts(n, kGroup), k = call->k * taps;
  const bool in_parts = call->isa & AMX && k > kDecodedK;
  // groups of columns whose decoded weight fits
  const i64 most = std::max<i64>(1, std::min<i64>(32, kDecoded / (2 * (in_parts ? kDecodedK : k)) / kGroup));
  i64 size, down;
  if (rows >= 4 * n) {  // decoding the weight in each thread is faster than gathering all rows in each
    size = parts(groups, parts(groups, most));
    down = std::max(threads, std::min(4 * threads, rows / 128));
  } else {
    const auto of_one_thread = [&](i64 size) { return parts(parts(groups, size), threads) * size; };
    size = most;
    for (i64 other = most; other > 0; --other) {
      if (of_one_thread(other) < of_one_thread(size)) size = other;
    }
    down = std::max<i64>(1, std::min(parts(threads, parts(groups, size)), rows / 128));
  }
  if (in_parts) down = std::max(down, parts(rows, kWaitingRows));
  call->task_columns = size * kGroup;
  call->task_rows = parts(parts(rows, down), kGroup) * kGroup;
}

int32_t pt2mx_linear(const LinearCall* call, ParallelFor parallel_for) { return multiply(*call, parallel_for); }

int32_t pt2mx_linear_of(const LinearCall* call, const void* x, const uint8_t* data, const uint8_t* scale,
                        const void* bias, void* out, ParallelFor parallel_for) {
  LinearCall own = *call;  // other threads may share the call
  own.x = x;
  own.data = data;
  own.scale = scale;
  own.bias = bias;
  own.out = out;
  return multiply(own, parallel_for);
}

int32_t pt2mx_convolution(const ConvolutionCall* call, ParallelFor parallel_for) {
  if (!supports_epilogue(call->linear)) return kUnsupported;
  if (merges_taps_of_row(*call)) return conv_small_channels(*call, parallel_for);
  Linear linear(call->linear, call);
  int32_t error = kUnsupported;
  with_register_decoder(call->linear.format, [&](auto* decoder) {
    error = multiply_on_isa<std::remove_pointer_t<decltype(decoder)>>(linear, true, parallel_for);
  });
  return error;
}

}  // extern "C"
