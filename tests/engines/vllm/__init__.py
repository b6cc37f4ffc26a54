"""Checkpoints of each layout in vLLM: what it looks for in them, and what it did where it ran."""
