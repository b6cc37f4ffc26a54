"""Weight rounding with calibration data; `pt2mx.pt2e.optimize` applies it to graphs."""

from pt2mx.algorithms.gptq import gptq
from pt2mx.algorithms.nested import cell_bounds, keep_slices
from pt2mx.algorithms.options import GPTQ, LearnedRounding, Rotation, ScaleSearch, Smoothing
from pt2mx.algorithms.scales import block_exponents, round_to_blocks

__all__ = [
    "GPTQ",
    "LearnedRounding",
    "Rotation",
    "ScaleSearch",
    "Smoothing",
    "block_exponents",
    "cell_bounds",
    "gptq",
    "keep_slices",
    "round_to_blocks",
]
