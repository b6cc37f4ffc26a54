"""linear_mx on the CPU with scales that have a significand, against float64 matmuls of the dequantized weight."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, parse
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.packing import packed_length
from tests.compare import relative_error
from tests.cpu_kernels import DTYPES
from tests.kernel_calls import ByArguments
from tests.threads import on_threads

kernels = ByArguments(cpu_linear)
NVFP4 = parse("nvfp4", axis=1)
#: (element, scale format, block): two blocks of a group, blocks of groups and of a row, and blocks that are neither
SPECS = [
    *((name, "e4m3_f32", 16) for name in ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "int4", "int8")),
    *(("fp4_e2m1", "e4m3", 32), ("fp4_e2m1", "e4m3_f32_divisor", 16), ("fp8_e4m3", "e5m3", 48), ("int4", "bf16", 128)),
    *(("int8", "f16", 32), ("fp8_e4m3", "f32", 2**40), ("fp6_e2m3", "f32", 64), ("fp4_e2m1", "e4m3_f32", 7)),
]


def packed(n: int, k: int, spec: MXSpec) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales, the scale of the tensor, and the dequantized weight."""
    weight = torch.randn(n, k) / 30
    t = float_scales.tensor_scale(weight, spec) if spec.scale_format.tensor else None
    scale, data = reference.quantize(weight, spec, tensor_scale=t)
    return data, scale, t, reference.dequantize(data, scale, spec, torch.float32, k, tensor_scale=t)


def check(x: Tensor, spec: MXSpec, n: int, bias: Tensor | None = None) -> None:
    """Check that the error is at most 1.5 times the error of torch's matmul in x's dtype."""
    data, scale, t, weight = packed(n, x.shape[-1], spec)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = kernels.linear(x, data, scale, bias, spec, tensor_scale=t)
    if y is None:  # many rows that no matrix instructions support
        assert len(x) > cpu_linear.FEW_ROWS and not (x.dtype == torch.bfloat16 and cpu_linear.isa_for(spec, len(x.T)))
        return
    plain = relative_error(F.linear(x, weight.to(x.dtype), bias), exact)
    assert relative_error(y, exact) <= max(1.5 * plain, 4e-7), (spec, x.shape, x.dtype)


@pytest.mark.parametrize(("name", "scale_format", "block"), SPECS)
def test_every_kind_of_block(name, scale_format, block):
    """Rows of x for each kernel; lengths with whole and partial groups and blocks."""
    spec = MXSpec(name, block, 1, scale_format=scale_format)
    for i, k in enumerate((160, 250, 71, 16, 4400)):
        for j, rows in enumerate((1, 3, 6, 40)):
            dtype = DTYPES[(i + j) % 3] if i % 2 else torch.bfloat16
            check(torch.randn(rows, k).to(dtype), spec, 37, torch.randn(37).to(dtype) if j % 2 else None)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_more_scales_than_a_chunk_of_factors(block):
    for rows in (1, 6):
        check(torch.randn(rows, 4112), MXSpec("fp4_e2m1", block, 1, scale_format="e4m3"), 7)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_without_matrix_registers(rows, monkeypatch):
    isa_for = cpu_linear.isa_for
    monkeypatch.setattr(cpu_linear, "isa_for", lambda spec, k: isa_for(spec, k) & ~cpu_linear.AMX)
    check(torch.randn(rows, 133).bfloat16(), NVFP4, 37)


@pytest.mark.diagonal
@pytest.mark.parametrize("rows", [1, 3, 5, 20])
@pytest.mark.parametrize("scale_format", ["e4m3", "e4m3_f32", "e5m3"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_with_every_scale(name, scale_format, rows):
    """A row of the identity gives a column of the dequantized weight, to the bit: NaN, negative, subnormal scales."""
    data = torch.randint(0, 256, (256 * 4, packed_length(32, FORMATS[name].bits))).to(torch.uint8)
    data[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    scale = torch.stack([torch.arange(256).repeat(4), torch.arange(1024) % 251], 1).to(torch.uint8)
    spec = MXSpec(name, 16, 1, scale_format=scale_format)
    t = torch.tensor(0.0123) if spec.scale_format.tensor else None
    weight = reference.dequantize(data, scale, spec, torch.float32, 32, tensor_scale=t)
    finite = weight.isfinite().all(1)
    for first in range(0, 32, rows):
        x = torch.eye(32)[first : first + rows]
        y = kernels.linear(x, data, scale, None, spec, tensor_scale=t).T
        assert torch.equal(y[finite], weight[finite, first : first + rows])
        assert not y[~finite].isfinite().all()
        half = kernels.linear(x.bfloat16(), data, scale, None, spec, tensor_scale=t).T
        # codes times scales are exact; the scale of the tensor is applied before or after they are summed
        torch.testing.assert_close(half[finite].float(), weight[finite, first : first + rows], rtol=2.0**-8, atol=0)
        assert torch.equal(half.isfinite(), y.isfinite())


@pytest.mark.parametrize("rows", [1, 6])
def test_nan_scale_spoils_its_row_only(rows):
    data, scale, t, _ = packed(9, 100, NVFP4)
    scale[4, 3] = 0x7F
    for dtype in DTYPES:
        y = kernels.linear(torch.randn(rows, 100).to(dtype), data, scale, None, NVFP4, tensor_scale=t)
        assert y[:, 4].isnan().all()
        assert y.isnan().sum() == rows


def test_values_too_large_without_the_scale_of_the_tensor():
    """Their sum is infinite before it is scaled."""
    data, scale, t, weight = packed(9, 128, NVFP4)
    x = (weight[3:4].sign() * 2.0**120).bfloat16()
    y = kernels.linear(x, data, scale, None, NVFP4, tensor_scale=t)
    assert relative_error(y[0, 3:4], x.double() @ weight[3].double()) < 2.0**-8


def test_same_bits_with_any_threads():
    data, scale, t, _ = packed(515, 300, NVFP4)
    for rows in (1, 3, 20, 100):
        x = torch.randn(rows, 300).bfloat16()
        results = on_threads(lambda x=x: kernels.linear(x, data, scale, None, NVFP4, tensor_scale=t), 1, 2, 1, 2)
        assert all(y is None or torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped(dtype):
    """A scale of the tensor for each expert, or one for all."""
    x, spec = torch.randn(20, 70).to(dtype), NVFP4.replace(axis=2)
    experts = [packed(37, 70, NVFP4) for _ in range(3)]
    data, scale, t = (torch.stack(parts) for parts in list(zip(*experts, strict=True))[:3])
    for scales in (t, t[0], t[:1]):
        y = kernels.grouped_linear(x, data, scale, torch.tensor([1, 8, 20]).int(), spec, tensor_scale=scales)
        for expert, (first, last) in enumerate([(0, 1), (1, 8), (8, 20)]):
            one = scales.expand(3)[expert]
            rows = x[first:last]
            expected = kernels.linear(rows, data[expert], scale[expert], None, NVFP4, tensor_scale=one)
            assert torch.equal(y[first:last], expected)


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "kind_of_block or (every_code and 3) or nan_scale")
