"""Graph passes that lower a converted model. They know operators, not quantization policies."""
