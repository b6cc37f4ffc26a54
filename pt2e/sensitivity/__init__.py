"""Which formats each module tolerates, measured on the model's output."""
