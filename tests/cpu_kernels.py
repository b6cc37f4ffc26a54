"""Compare the C++ kernels of quantization with the reference, on numbers of every kind."""

import math
import os
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pt2mx import ELEMENTS, FORMATS, SCALE_FORMATS, MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import quantize as quantize_kernels
from pt2mx.kernels.packing import pack
from pt2mx.kernels.reference import random_bits
from pt2mx.modes import ROUNDINGS, SCALE_MODES, scale_modes
from tests.compare import differing
from tests.kernel_calls import ByArguments, selected
from tests.oracle import modes_of
from tests.random_values import random_values

cpu = ByArguments(quantize_kernels)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = [(scale_mode, rounding) for scale_mode in SCALE_MODES for rounding in ROUNDINGS]


def modes_of_element(name: str) -> list[tuple[str, str]]:
    """Return the scale modes that are defined for an element, with each rounding."""
    return [(scale_mode, rounding) for scale_mode in modes_of(name) for rounding in ROUNDINGS]


#: of dimensions and of blocks, around those of vectors
_SIZES = (0, 1, 2, 3, 5, 16, 31, 33, 64, 70)
_BLOCKS = (1, 2, 3, 8, 16, 31, 32, 33, 48, 64, 100, 2**40)


def assert_same(actual: Tensor, expected: Tensor, context: object) -> None:
    """Equal to the bit, but for the payloads of NaNs; contiguous."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, context
    assert actual.is_contiguous(), context
    differs = differing(actual, expected)
    assert not differs.any(), (context, differs.nonzero()[:5].tolist(), actual[differs][:5], expected[differs][:5])


def check_cpu(
    x: Tensor,
    spec: MXSpec,
    seed: int = 0,
    target: torch.dtype = torch.float32,
    tensor_scale: Tensor | None = None,
) -> None:
    """Every function on x: (..., n, ...), blocks along spec.axis, which counts from the front."""
    seeds = torch.tensor(seed) if ROUNDINGS[spec.rounding].random else None
    random = None if seeds is None else random_bits(seeds, x.shape)
    context = (spec, spec.axis, x.shape, x.dtype, target, tensor_scale)
    scale, data = reference.quantize(x, spec, random, tensor_scale=tensor_scale)
    actual_scale, actual_data = cpu.quantize(x, spec, seeds, tensor_scale)
    assert_same(actual_scale, scale, context)
    assert_same(actual_data, data, context)
    expected = reference.fake_quantize(x, spec, random, tensor_scale=tensor_scale)
    assert_same(cpu.fake_quantize(x, spec, seeds, tensor_scale), expected, context)
    length = x.shape[spec.axis]
    expected = reference.dequantize(data, scale, spec, target, length, tensor_scale=tensor_scale)
    assert_same(cpu.dequantize(data, scale, spec, target, length, tensor_scale), expected, context)
    grad = torch.randn(x.shape).to(target)
    expected = reference.clip_gradient(grad, x, spec, tensor_scale=tensor_scale).contiguous()
    assert_same(cpu.clip_gradient(grad, x, spec, tensor_scale), expected, context)


def random_specs(
    count: int, modes: Sequence[tuple[str, str]], scale_formats: Sequence[str] = ("e8m0",)
) -> Iterator[tuple[Tensor, MXSpec]]:
    """Draw tensors of one to four dimensions, some of them empty or transposed, and for each a spec with one of the
    modes (scale mode, rounding)."""
    draw = random.Random(0)
    for _ in range(count):
        shape = draw.choices(_SIZES, k=draw.randint(1, 4))
        while math.prod(shape) > 40_000:
            shape[shape.index(max(shape))] = 3
        x = random_values(tuple(shape), draw.choice(DTYPES), draw.randrange(5))
        name, block, axis = draw.choice([*FORMATS, "int4", "fp3_e1m1"]), draw.choice(_BLOCKS), draw.randrange(x.dim())
        scale_format = SCALE_FORMATS[draw.choice(scale_formats)]
        defined = scale_modes(scale_format, ELEMENTS[name])
        mode = draw.choice([mode for mode in modes if mode[0] in defined])
        spec = MXSpec(name, block, axis, *mode, scale_format=scale_format)
        yield (x.transpose(0, -1) if draw.random() < 0.5 else x), spec


def packed(n: int, k: int, name: str, block: int = 32) -> tuple[Tensor, Tensor, MXSpec]:
    """Return the codes, (N, bytes), and scales of a random weight, and its spec."""
    scale, data = ops.quantize_mx(torch.randn(n, k), name, block, -1, "floor", "even")
    return data, scale, MXSpec(name, block, 1)


def random_codes(
    n: int, k: int, name: str, block: int = 32, scales: tuple[int, int] = (120, 134)
) -> tuple[Tensor, Tensor, MXSpec]:
    """Return random codes, (N, bytes), and scales, (N, blocks), and their spec."""
    spec = MXSpec(name, block, 1)
    codes = torch.randint(1 << spec.element.bits, (n, k), dtype=torch.uint8)
    data = pack(codes, 1, spec.element.bits) if spec.element.bits < 8 else codes
    return data, torch.randint(*scales, (n, -(-k // block)), dtype=torch.uint8), spec


def linear(
    x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, spec: MXSpec, dtype: torch.dtype | None = None
) -> Tensor:
    """`linear_mx` by the kernel, or by its definition where that returns None."""
    return selected.linear(x, data, scale, bias, spec, 0, dtype)


def environment(folder: object, **variables: str) -> dict[str, str]:
    """For a process that builds its kernels in that folder."""
    return {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), **variables}


def of_capability(capability: str) -> dict[str, str]:
    """For a process with the kernels of a capability of processors, built once for each state of the sources."""
    return {**os.environ, "ATEN_CPU_CAPABILITY": capability}
