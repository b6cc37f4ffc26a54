"""Checkpoints of Hugging Face with MX weights: write, load and convert them."""
