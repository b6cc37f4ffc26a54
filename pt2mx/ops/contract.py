"""The contract of the operators `torch.ops.pt2mx.*` with compilers that read programs with them.

An operator's class says what it does, its version, and the shapes, dtypes and layouts of its arguments. `contract_text`
writes the document for authors of compilers. Importing this module registers all operators, and sets their docstrings.
"""

from __future__ import annotations

import textwrap

import torch

from pt2mx.ops.accumulated import (
    AttentionAccumulated,
    ConvolutionAccumulated,
    LinearAccumulated,
    MatmulAccumulated,
)
from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize
from pt2mx.ops.attention import AttentionBfloat16, AttentionMX, MatmulBfloat16
from pt2mx.ops.cache import StoreMX
from pt2mx.ops.convolution import Conv2dMX
from pt2mx.ops.decoding import DecodingAttention, DecodingAttentionMX, NormedLinearMX, ResidualLinearMX
from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows, MmFP8Rows, QuantizeFP8Rows
from pt2mx.ops.hadamard import Hadamard, RotatedFakeQuantize
from pt2mx.ops.linear import GroupedLinearMX, LinearMX, LinearMXMMALayout
from pt2mx.ops.operator import Operator
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
from pt2mx.ops.quantize_epilogue import Conv2dFakeQuantize, LinearFakeQuantize
from pt2mx.ops.rope import RotateAndStore, RotateQuantizeAndStore
from pt2mx.ops.scaled_mm import ScaledMM, SwizzleScale
from pt2mx.ops.stochastic import RandomBits
from pt2mx.ops.tensor_scale import TensorScale

_CLASSES: tuple[type[Operator], ...] = (
    *(Quantize, Dequantize, FakeQuantize, ClipGradient, TensorScale, RandomBits),
    *(LinearMX, GroupedLinearMX, Conv2dMX, LinearMXMMALayout, AttentionMX, StoreMX),
    *(NormedLinearMX, ResidualLinearMX),
    *(RotateAndStore, DecodingAttention, RotateQuantizeAndStore, DecodingAttentionMX),
    *(Hadamard, RotatedFakeQuantize, ScaledMM),
    *(QuantizeFP8Rows, LayerNormFP8Rows, MmFP8Rows),
    *(ActivationFakeQuantize, LayerNormFakeQuantize),
    *(MatmulBfloat16, AttentionBfloat16),
    *(LinearFakeQuantize, Conv2dFakeQuantize),
    SwizzleScale,
    *(MatmulAccumulated, LinearAccumulated, ConvolutionAccumulated, AttentionAccumulated),
)
#: name -> class, in the order of the document
OPERATORS = {operator.name: operator for operator in _CLASSES}

_WIDTH = 116


def schema_of(name: str) -> torch.FunctionSchema:
    """Return the registered schema of an operator."""
    return OPERATORS[name].overload._schema


def docstring(name: str) -> str:
    """Return the docstring of an operator, for `help`: the contract's words, and an example."""
    operator = OPERATORS[name]
    arguments = [f"{argument.name}: {argument.meaning}" for argument in operator.arguments]
    results = [f"{result}: {meaning}" if result else meaning for result, meaning in operator.results.items()]
    example = ">>> import torch, pt2mx\n" + operator.example().rstrip()
    sections = {
        "Args": [_item(text.replace("`", "")) for text in arguments],
        "Returns": [_item(text) for text in results],
        "Raises": [_item("MXError: for arguments that do not fit each other.")],
        "Example": [textwrap.indent(example, "    ")],
    }
    parts = [textwrap.fill(operator.summary(), _WIDTH, break_on_hyphens=False)]
    parts += [f"{title}:\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    return "\n\n".join(parts) + "\n"


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)


for _name, _operator in OPERATORS.items():
    _operator.overload.__doc__ = docstring(_name)
