// Registers the operators when the library is loaded, unless Python has registered them in this process.

#include "tensors.h"

namespace {

#include "schemas.inc"

// True if this library defined the schemas; otherwise Python's pt2mx did, and its operators are used.
bool defined = false;

STABLE_TORCH_LIBRARY_FRAGMENT(pt2mx, library) {
  try {
    for (const char* schema : kSchemas) library.def(schema);
    defined = true;
  } catch (const std::exception&) {  // the name is taken, which torch's stable interface does not tell in advance
  }
}

STABLE_TORCH_LIBRARY_IMPL(pt2mx, CPU, library) {
  if (!defined) return;
  library.impl("linear_mx", TORCH_BOX(&pt2mx::linear));
  library.impl("grouped_linear_mx", TORCH_BOX(&pt2mx::grouped_linear));
  library.impl("conv2d_mx", TORCH_BOX(&pt2mx::conv2d));
  library.impl("attention_mx", TORCH_BOX(&pt2mx::attention));
  library.impl("matmul_bfloat16", TORCH_BOX(&pt2mx::matmul_bfloat16));
  library.impl("attention_bfloat16", TORCH_BOX(&pt2mx::attention_bfloat16));
  library.impl("hadamard", TORCH_BOX(&pt2mx::hadamard));
  library.impl("rotated_fake_quantize_mx", TORCH_BOX(&pt2mx::rotated_fake_quantize));
  library.impl("activation_fake_quantize_mx", TORCH_BOX(&pt2mx::activation_fake_quantize));
  library.impl("layer_norm_fake_quantize_mx", TORCH_BOX(&pt2mx::layer_norm_fake_quantize));
  library.impl("linear_fake_quantize_mx", TORCH_BOX(&pt2mx::linear_fake_quantize));
  library.impl("conv2d_fake_quantize_mx", TORCH_BOX(&pt2mx::conv2d_fake_quantize));
  library.impl("random_bits", TORCH_BOX(&pt2mx::random_bits));
}

}  // namespace
