"""ONNX files: converted programs as nodes of an own domain with bodies of standard operators."""
