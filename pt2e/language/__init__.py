"""Language models: a checkpoint of transformers as one program with its cache, quantized, in a folder, to text."""
