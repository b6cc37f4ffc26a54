"""Accuracy at 4 bits on pretrained weights: rounded to nearest, and by the presets of `pt2mx.optimize`."""
