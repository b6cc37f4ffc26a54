"""Checkpoints of Hugging Face that hold MX weights, out and in."""
