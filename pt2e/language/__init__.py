"""Language models: one program with its cache from a checkpoint of transformers, quantized, that generates text."""
