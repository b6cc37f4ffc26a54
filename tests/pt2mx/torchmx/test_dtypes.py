import pytest
import torch

import pt2mx
from pt2mx import ELEMENTS, MXTensor
from pt2mx.torchmx import dtypes


@pytest.mark.parametrize("name", [n for n in ELEMENTS if not n.startswith("int") or n == "int8"])
def test_a_dtype_names_its_element(name):
    dtype = dtypes.dtype_of(ELEMENTS[name])
    assert pt2mx.parse_element(dtype) is ELEMENTS[name] and str(dtype) == repr(dtype) == name.replace("fp", "float")
    assert dtypes.dtype_of(ELEMENTS[name]) is dtype


@pytest.mark.parametrize("dtype", [*dtypes.SUPPORTED_ELEM_DTYPES, dtypes.float8_e5m2], ids=str)
def test_numbers_are_those_of_the_grid(dtype):
    """A block of large multiples quantizes to the largest value, in whole numbers for int8."""
    x = torch.full((32,), dtype.max) * (1 if dtype is not dtypes.int8 else 2.0**-6)
    assert torch.equal(MXTensor.to_mx(x, dtype).to_dtype(), x)
    assert 2.0**dtype.max_pow2 <= dtype.max < 2.0 ** (dtype.max_pow2 + 1)
    if dtype.torch_dtype is not None and dtype.torch_dtype.is_floating_point:
        assert dtype.max == torch.finfo(dtype.torch_dtype).max


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.e8m0], ids=str)
def test_others_are_no_elements(dtype):
    with pytest.raises(pt2mx.MXError, match=f"unknown MX element format {dtype}"):
        MXTensor.to_mx(torch.ones(32), dtype)
