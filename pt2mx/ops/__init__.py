"""The operators `torch.ops.pt2mx.*`; the files beside register their products, decompositions and Inductor code."""

from pt2mx.ops.quantization import clip_gradient_mx, dequantize_mx, fake_quantize_mx, quantize_mx, random_bits

__all__ = ["clip_gradient_mx", "dequantize_mx", "fake_quantize_mx", "quantize_mx", "random_bits"]
