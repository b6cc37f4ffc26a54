"""The formats that modules of a model can stand, by the model's own output."""
