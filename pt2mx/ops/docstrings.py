"""The docstrings of the operators, for `help`: the contract's words, and an example of each. Importing this module sets
them: `pt2mx.register` does."""

from __future__ import annotations

import textwrap

import torch

from pt2mx.ops import linear, quantization
from pt2mx.ops.contract import OPERATORS, meanings

_WIDTH = 116

_DECLARED = (*quantization.OPERATORS, *linear.OPERATORS)

#: operator -> a call of it
_EXAMPLES = {
    **{operator.name: "\n" + operator.example() for operator in _DECLARED},
    "conv2d_mx": """
        >>> scale, data = pt2mx.quantize_mx(torch.ones(1, 2, 2, 4), "mxfp4")  # a kernel of 2 x 2, 4 channels
        >>> torch.ops.pt2mx.conv2d_mx(torch.ones(1, 3, 3, 4), data, scale, None, "fp4_e2m1", 32, stride=2)
        tensor([[[[16.]]]])
        """,
    "attention_mx": """
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(1, 1, 4, 4), "mxfp4")
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> torch.ops.pt2mx.attention_mx(query, data, scale, data, scale, "fp4_e2m1", 32, 4).flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
        """,
    "hadamard": """
        >>> torch.ops.pt2mx.hadamard(torch.tensor([8.0, 0.0, 0.0, 0.0]), 4)
        tensor([4., 4., 4., 4.])
        >>> torch.ops.pt2mx.hadamard(torch.ones(4), 4)
        tensor([ 1.,  1.,  1., -1.])
        """,
    "rotated_fake_quantize_mx": """
        >>> torch.ops.pt2mx.rotated_fake_quantize_mx(torch.tensor([8.0, 0.0, 0.0, 1.0]), 4, "fp4_e2m1", 32)
        tensor([4., 4., 4., 4.])
        """,
    "scaled_mm_mx": """
        >>> swizzle = torch.ops.pt2mx.swizzle_scale
        >>> x_scale, x = pt2mx.quantize_mx(torch.arange(32.0).reshape(1, 32), "mxfp8")
        >>> scale, weight = pt2mx.quantize_mx(torch.eye(32)[:16], "mxfp8")
        >>> types = ("fp8_e4m3", "fp8_e4m3", torch.float32)
        >>> torch.ops.pt2mx.scaled_mm_mx(x, swizzle(x_scale), weight, swizzle(scale), None, *types)[0, :4]
        tensor([0., 1., 2., 3.])
        """,
    "quantize_fp8_rows": """
        >>> data, scale, _ = torch.ops.pt2mx.quantize_fp8_rows(torch.ones(1, 32), "fp4_e2m1")
        >>> data.view(torch.float8_e4m3fn)[0, 0], scale
        (tensor(256., dtype=torch.float8_e4m3fn), tensor([[0.0039]]))
        """,
    "layer_norm_fp8_rows": """
        >>> x = torch.tensor([[1.0, -1.0] * 16])
        >>> normed, *rows = torch.ops.pt2mx.layer_norm_fp8_rows(x, x, None, None, 0.0, "fp4_e2m1")
        >>> normed[0, :4]
        tensor([ 1., -1.,  1., -1.])
        """,
    "mm_fp8_rows": """
        >>> weight, scale, _ = torch.ops.pt2mx.quantize_fp8_rows(torch.eye(32), "fp4_e2m1")
        >>> rows = torch.ops.pt2mx.quantize_fp8_rows(torch.full((1, 32), 3.0), "fp6_e2m3")
        >>> torch.ops.pt2mx.mm_fp8_rows(*rows, weight, scale)[0, :4]
        tensor([3., 3., 3., 3.])
        """,
    "activation_fake_quantize_mx": """
        >>> torch.ops.pt2mx.activation_fake_quantize_mx(torch.tensor([-1.0, 1.1, 4.0]), "relu", "fp4_e2m1", 32)
        tensor([0., 1., 4.])
        """,
    "layer_norm_fake_quantize_mx": """
        >>> x = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> torch.ops.pt2mx.layer_norm_fake_quantize_mx(x, x, None, None, 0.0, "fp4_e2m1", 32)
        (tensor([[ 0.6325, -0.6325,  1.2649, -1.2649]]), tensor([[ 0.7500, -0.7500,  1.5000, -1.5000]]))
        """,
    "linear_fake_quantize_mx": """
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4), "mxfp4")
        >>> x = torch.tensor([-1.0, 1.1, 4.0, 0.0])
        >>> modes = (None, "relu", "fp4_e2m1", 32)
        >>> torch.ops.pt2mx.linear_fake_quantize_mx(x, data, scale, None, "fp4_e2m1", 32, *modes)
        tensor([0., 1., 4., 0.])
        """,
    "conv2d_fake_quantize_mx": """
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(4, 1, 1, 4), "mxfp4")
        >>> x = torch.tensor([-1.0, 1.1, 4.0, 0.0]).reshape(1, 1, 1, 4)
        >>> modes = (1, 0, 1, None, x, "relu", True, "fp4_e2m1", 32)
        >>> activated, quantized = torch.ops.pt2mx.conv2d_fake_quantize_mx(x, data, scale, None, "fp4_e2m1", 32, *modes)
        >>> activated.flatten(), quantized.flatten()
        (tensor([0.0000, 2.2000, 8.0000, 0.0000]), tensor([0., 2., 8., 0.]))
        """,
    "matmul_bfloat16": """
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.ops.pt2mx.matmul_bfloat16(x, x)
        tensor([[ 7., 10.],
                [15., 22.]])
        """,
    "attention_bfloat16": """
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> keys = torch.eye(4).reshape(1, 1, 4, 4)
        >>> torch.ops.pt2mx.attention_bfloat16(query, keys, keys).flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
        """,
    "swizzle_scale": """
        >>> swizzled = torch.ops.pt2mx.swizzle_scale(torch.tensor([[127, 128]], dtype=torch.uint8))
        >>> swizzled.shape, swizzled[:4]
        (torch.Size([512]), tensor([127, 128,   0,   0], dtype=torch.uint8))
        """,
}


def docstring(name: str) -> str:
    """Return the docstring of an operator of the contract."""
    operator = OPERATORS[name]
    arguments = [f"{argument}: {meaning}" for argument, meaning in meanings(name).items()]
    results = [f"{result}: {meaning}" if result else meaning for result, meaning in operator.results.items()]
    example = ">>> import torch, pt2mx" + textwrap.dedent(_EXAMPLES[name]).rstrip()
    sections = {
        "Args": [_item(text.replace("`", "")) for text in arguments],
        "Returns": [_item(text) for text in results],
        "Raises": [_item("MXError: for arguments that do not fit each other.")],
        "Example": [textwrap.indent(example, "    ")],
    }
    parts = [textwrap.fill(operator.what, _WIDTH, break_on_hyphens=False)]
    return "\n\n".join([*parts, *(f"{title}:\n" + "\n".join(lines) for title, lines in sections.items())]) + "\n"


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)


#: operator -> its docstring; doctest runs their examples
__test__ = {name: docstring(name) for name in OPERATORS}

for _name, _text in __test__.items():
    getattr(torch.ops.pt2mx, _name).default.__doc__ = _text
