"""Low-rank adapters (LoRA) beside packed weights: add, train, save, load and merge them."""
