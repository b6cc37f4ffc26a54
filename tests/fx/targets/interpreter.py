"""Run the MLIR text of the targets `tosa` and `stablehlo` on tensors.

A tensor of codes holds the values of its elements, and a tensor of scales their powers of two. What an operation does
follows from its name and its types alone.
"""

import re

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import MXSpec
from pt2mx.fx.targets.table import MLIR_ELEMENTS
from pt2mx.kernels.elements import decode
from pt2mx.kernels.packing import unpack
from pt2mx.ops.quantization import Quantize

_ELEMENTS = {kind: element for element, kind in MLIR_ELEMENTS.items()}
_FUNCTION = re.compile(r"func\.func @(\w+)\((.*)\) -> (\S+) \{\n((?:  .*\n)+)\}\n")
_LINE = re.compile(r'  %(\w+)(:2)? = (?:stablehlo\.custom_call @"(.+?)"\((.+?)\)|tosa\.(\w+) (.+?)) ?(\{.*?\})? : (.*)')
_TYPE = re.compile(r"tensor<((?:[\d?]+x)+)(\w+)>")


def run(text: str, name: str, **arguments: Tensor) -> Tensor:
    """Return the result of a function in the text."""
    functions = {match[1]: match for match in _FUNCTION.finditer(text)}
    _, signature, result, body = functions[name].groups()
    types = dict(re.findall(r"%(\w+): (tensor<\S+>)", signature))
    assert types.keys() == arguments.keys()
    for argument, kind in types.items():
        check(arguments[argument], kind)
    values = dict(arguments)
    *lines, last = body.splitlines()
    for line in lines:
        target, two, custom, custom_operands, tosa, tosa_operands, attributes, kind = _LINE.fullmatch(line).groups()
        operands = [values[operand.strip()[1:]] for operand in (custom_operands or tosa_operands).split(",")]
        given, returned = kind.split(" -> ")
        for operand, each in zip(operands, _TYPE.finditer(given), strict=True):
            check(operand, each[0])
        outcome = OPERATIONS[custom or tosa](returned, attributes or "", *operands)
        for i, (value, each) in enumerate(zip(outcome, _TYPE.finditer(returned), strict=True)):
            check(value, each[0])
            values[f"{target}#{i}" if two else target] = value
    value, kind = re.fullmatch(r"  return %(\w+) : (\S+)", last).groups()
    assert kind == result
    return values[value]


def check(value: Tensor, kind: str) -> None:
    """Assert that a tensor has the shape of a type."""
    sizes = _TYPE.fullmatch(kind)[1].split("x")[:-1]
    assert len(sizes) == value.dim() and all(n in ("?", str(m)) for n, m in zip(sizes, value.shape, strict=True)), kind


def elements_of(codes: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor]:
    """Return the values of packed codes along the last dimension, and the scales."""
    return decode(unpack(codes, codes.dim() - 1, spec.element.bits), spec.element), torch.exp2(scale.double() - 127)


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.double().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2).float()


def _quantize(scale_mode: str, rounding: str, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    spec = MXSpec(_ELEMENTS[_TYPE.search(kind)[2]], scale_mode=scale_mode, rounding=rounding)
    scale, codes = Quantize(x, spec).call()
    return elements_of(codes, scale, spec)


def _quantize_by_config(kind: str, attributes: str, x: Tensor) -> tuple[Tensor, Tensor]:
    config = dict(pair.split("=") for pair in re.search('backend_config = "(.*)"', attributes)[1].split())
    assert config["block_size"] == "32" and config["element"] == _ELEMENTS[_TYPE.search(kind)[2]]
    return _quantize(config["scale_mode"], config["rounding"], kind, x)


def _block(attributes: str) -> None:
    assert attributes == "{block_size = #tosa.block_size<BLOCK_SIZE_32>}"


def _tosa_matmul(kind, attributes, a, a_scale, b, b_scale):
    _block(attributes)
    return (F.linear(dequantized(a, a_scale)[0], dequantized(b, b_scale)[0]).unsqueeze(0),)


#: operation -> (types of the results, attributes, operands) -> results
OPERATIONS = {
    "cast_to_block_scaled": lambda kind, attributes, x: _block(attributes) or _quantize("rceil", "even", kind, x),
    "cast_from_block_scaled": lambda kind, attributes, *q: _block(attributes) or (dequantized(*q),),
    "matmul_t_block_scaled": _tosa_matmul,
    "pt2mx.quantize_mx": _quantize_by_config,
    "__op$dequantize": lambda kind, attributes, *q: (dequantized(*q),),
    "__op$block_scaled_dot": lambda kind, attributes, a, b, sa, sb: (F.linear(dequantized(a, sa), dequantized(b, sb)),),
}
