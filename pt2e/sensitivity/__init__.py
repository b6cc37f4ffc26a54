"""Measure which formats each module tolerates, by the error of the model's output."""
