"""All operators of one tensor, to compare eager and compiled runs; and checks of operators by torch."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pt2mx import dequantize_mx, fake_quantize_mx, quantize_mx
from tests.models import module_of

_UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")


def opchecks(names: Iterable[str]) -> list[object]:
    """Return parameters: a name, and checks of `torch.library.opcheck`.

    The first name has all checks. Of the others, the check that traces forward and backward is slow: it takes 40 times
    as long as the rest."""
    parameters = []
    for i, name in enumerate(names):
        marks = [pytest.mark.slow] if i else []
        parameters.append(pytest.param(name, ("test_aot_dispatch_dynamic",), id=f"{name}, traced", marks=marks))
        parameters.append(pytest.param(name, _UNTRACED, id=name))
    return parameters


def through_all_operators(x: Tensor, name: str, axis: int, scale_mode: str = "floor") -> tuple[Tensor, ...]:
    """(fake_quantize, scale, data, dequantize) of x, each between other operators."""
    x = torch.relu(x) - 0.3  # a producer and consumers for the kernels to fuse with
    fake = fake_quantize_mx(x, name, axis=axis, scale_mode=scale_mode) * 2
    scale, data = quantize_mx(x, name, axis=axis, scale_mode=scale_mode)
    values = dequantize_mx(data, scale, name, axis=axis, target_dtype=x.dtype, length=x.shape[axis])
    return fake, scale + 1, data ^ 1, values * 2


def outputs_of_a_package(name: str, device: str, example: int, path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Export a package of all operators with `example` values along the quantized dimension. Return its outputs for
    other numbers of values, and the expected ones. AOTInductor has no guards, so the package must not assume properties
    of the example's sizes."""
    operators = module_of(lambda self, x: through_all_operators(x, name, 1))  # x: (3, n, 5)
    shapes = ({1: torch.export.Dim("n", min=2, max=999)},)
    program = torch.export.export(operators, (torch.randn(3, example, 5, device=device),), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    package = torch._inductor.aoti_load_package(str(path))
    for n in (2, 20, 32, 33, 40, 64, 100):
        x = torch.randn(3, n, 5)
        yield from zip(package(x.to(device)), operators(x), strict=True)
