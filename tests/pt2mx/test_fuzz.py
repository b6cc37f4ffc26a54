"""Random calls with random arguments end in a right answer or in an MXError."""

import random

import pytest
import torch

from pt2mx import ELEMENTS, MXError, MXSpec, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels import reference
from pt2mx.kernels.reference import random_bits
from pt2mx.modes import ROUNDINGS
from tests.oracle import modes_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: argument -> invalid values
WRONG = {
    "elem_dtype": [
        "fp5",
        "fp17_e7m9",
        "fp16_e8m7",
        "",
        None,
        3,
        "mxfp4{",
        torch.float32,
        (9, 9),
        "int1",
        "int17",
        "fp8_e0m7",
    ],
    "block_size": [0, -1, 2.5, "32", True, 2**70],
    "axis": [99, -99, 1.0, "0", True, 2**70],
    "scale_mode": ["flor", 1, ["floor"], "FLOOR "],
    "rounding": ["evn", 0, "nearest"],
    "seed": [-1, 2**63, 0.5, "1", True],
}


def tensor(rng: random.Random) -> torch.Tensor:
    shape = [rng.choice([0, 1, 2, 3, 5, 7, 16, 33, 40]) for _ in range(rng.randrange(5))]
    shape = shape if torch.Size(shape).numel() < 5000 else shape[:2]
    kind = rng.randrange(4)
    if kind == 0:  # any bit pattern
        x = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32).view(torch.float32)
    else:
        x = torch.randn(shape) * 10.0 ** rng.choice([-44, -38, -20, 0, 0, 0, 5, 30, 38])
    x = x.to(rng.choice(DTYPES))
    if kind == 3 and x.dim():
        x = x.transpose(rng.randrange(x.dim()), rng.randrange(x.dim()))
        x = x.expand(2, *x.shape) if x.dim() < 3 else x[..., ::2]
    return x


def call(rng: random.Random) -> bool:
    """Make one call; return whether its arguments were allowed."""
    x = tensor(rng)
    rank = max(x.dim(), 1)
    name = rng.choice(list(ELEMENTS))
    given = {
        "elem_dtype": name,
        "block_size": rng.choice([1, 2, 3, 8, 16, 31, 32, 64, 100, 4096, 2**62]),
        "axis": rng.randrange(-rank, rank),
        "scale_mode": rng.choice(modes_of(name)),
        "rounding": rng.choice(list(ROUNDINGS)),
        "seed": rng.choice([0, 1, 2**40, 2**63 - 1]),
    }
    wrong = rng.random() < 0.2
    if wrong:
        name = rng.choice(list(WRONG))
        given[name] = rng.choice(WRONG[name])
    try:
        scale, data = quantize_mx(x, **given)
    except MXError:
        assert wrong, given
        with pytest.raises(MXError):
            fake_quantize_mx(x, **given)
        return False
    assert not wrong, given
    check(x, given, scale, data)
    return True


def check(x: torch.Tensor, given: dict, scale: torch.Tensor, data: torch.Tensor) -> None:
    """Compare both ways with the reference, to the bit."""
    seed = given.pop("seed")
    row = torch.atleast_1d(x)
    spec = MXSpec(*given.values())
    spec = spec.replace(axis=spec.axis % row.dim())
    numbers = random_bits(torch.tensor(seed), row.shape) if ROUNDINGS[spec.rounding].random else None
    if row.numel():
        want_scale, want_data = reference.quantize(row.contiguous(), spec, numbers)
        assert torch.equal(scale, want_scale) and torch.equal(data, want_data), (x, given)
    y = fake_quantize_mx(x, spec, seed=seed)
    assert y.shape == x.shape and y.dtype == x.dtype and (not x.numel() or steps(y) == steps(torch.empty_like(x)))
    length = row.shape[spec.axis]
    back = dequantize_mx(data, scale, spec, target_dtype=x.dtype, length=length).reshape(x.shape)
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    same = (y.view(integer) == back.view(integer)) | (y.isnan() & back.isnan())
    assert same.all(), (x, given, y, back)
    if row.numel():
        want = reference.fake_quantize(row.contiguous(), spec, numbers).reshape(x.shape)
        assert ((y.view(integer) == want.view(integer)) | (y.isnan() & want.isnan())).all(), (x, given, y, want)


def steps(x: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with a second value; others address nothing."""
    return [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1]


@pytest.mark.parametrize(
    ("seed", "calls"), [(0, 500), *(pytest.param(s, 25_000, marks=pytest.mark.slow) for s in range(1, 5))]
)
def test_random_calls(seed, calls):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    allowed = sum(call(rng) for _ in range(calls))
    assert 0.7 * calls < allowed < 0.9 * calls
