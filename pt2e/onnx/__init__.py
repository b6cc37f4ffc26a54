"""ONNX files: write converted programs, and quantize float files."""
