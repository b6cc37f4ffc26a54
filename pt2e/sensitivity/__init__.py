"""Which modules of a model can stand which formats, by the model's own output."""
