"""`quantize_onnx`: quantize a float ONNX file."""
