"""`mx_quantize` of torch tensors and NumPy arrays, compared with pychop for the same inputs."""

import ml_dtypes
import numpy as np
import pytest
import torch

from pt2mx import MX_FORMATS, MXError, MXSpec, fake_quantize_mx, mx_quantize
from pt2mx.arrays import as_torch
from tests.golden import GOLDEN, OF_PYCHOP

DTYPES = {
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
}


def sample(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("fmt", sorted({entry["fmt"] for entry in OF_PYCHOP}))
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_pychop_gives_the_same_bits(fmt, convert):
    entries = [entry for entry in OF_PYCHOP if entry["fmt"] == fmt]
    for entry in entries:
        x, want = GOLDEN["in/" + entry["input"]], GOLDEN[entry["dq"]]
        got = mx_quantize(convert(x), "int8_full" if fmt == "int8" else fmt, block_size=entry["block"], axis=None)
        assert isinstance(got, type(convert(x))) and got.shape == x.shape
        np.testing.assert_array_equal(np.asarray(got), want.reshape(x.shape), err_msg=str(entry))
    assert len(entries) == (12 if fmt == "int8" else 11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX_FORMATS)
def test_torch_and_numpy_agree_to_the_bit(name, dtype):
    numpy_dtype, torch_dtype = DTYPES[dtype]
    x = sample(3, 5, 40, dtype=numpy_dtype)
    t = torch.from_numpy(x.astype(np.float32)).to(torch_dtype)
    for axis in (-1, 0, 1):
        got, want = mx_quantize(x, name, axis=axis), fake_quantize_mx(t, name, axis=axis)
        assert got.dtype == x.dtype and got.shape == x.shape and got.flags.c_contiguous and got.flags.writeable
        assert got.tobytes() == want.view(torch.uint8).numpy().tobytes()
        assert torch.equal(mx_quantize(t, name, axis=axis), want)


def test_blocks_over_the_flattened_array():
    x = torch.randn(5, 7)
    flat = fake_quantize_mx(x.reshape(-1), "mxfp4", 8).reshape(5, 7)
    assert torch.equal(mx_quantize(x, "mxfp4", 8, axis=None), flat)
    assert torch.equal(mx_quantize(x.T.contiguous().T, "mxfp4", 8, axis=None), flat)
    assert not torch.equal(mx_quantize(x, "mxfp4", 8), flat)
    assert np.array_equal(mx_quantize(x.T.contiguous().numpy().T, "mxfp4", 8, axis=None), flat.numpy())


def test_format_and_arguments():
    x = torch.randn(64, 64)
    assert torch.equal(mx_quantize(x), fake_quantize_mx(x, "fp8_e4m3", 32, -1))
    assert torch.equal(mx_quantize(x, (0, 7)), fake_quantize_mx(x, "int8"))
    assert torch.equal(mx_quantize(x, (3, 1), 16), fake_quantize_mx(x, "fp5_e3m1", 16))
    spelled = fake_quantize_mx(x, "int8", 16, 0)
    for format in ("mxint8{16,0}", MXSpec("int8", 16, 0)):  # arguments replace its fields
        assert torch.equal(mx_quantize(x, format), spelled)
        assert torch.equal(mx_quantize(x, format, block_size=8), fake_quantize_mx(x, "int8", 8, 0))
        assert torch.equal(mx_quantize(x, format, axis=-1), fake_quantize_mx(x, "int8", 16, -1))
    modes = {"scale_mode": "rceil", "rounding": "toward_zero"}
    assert torch.equal(mx_quantize(x, "mxfp4", **modes), fake_quantize_mx(x, "mxfp4", **modes))


def test_widths_of_the_scale():
    x = torch.tensor([[2.0**-20, 1.5 * 2.0**-20, 2.0**-4, 2.0**-5]])
    narrow = mx_quantize(x, "int8", 2, scale_exp_bits=4)  # exponents of at least -7, quanta of 2**-13
    assert narrow.tolist() == [[0.0, 0.0, 2.0**-4, 2.0**-5]]
    assert torch.equal(mx_quantize(x, "int8", 2, scale_sig_bits=3), x)
    assert torch.equal(narrow, mx_quantize(x, MXSpec("int8", 2, scale_exp_bits=4)))


def test_the_gradient_of_a_tensor_is_straight_through():
    for axis in (-1, 0, None):
        x = torch.randn(4, 40, requires_grad=True)
        weight = torch.randn(4, 40)
        (mx_quantize(x, "mxfp4", axis=axis) * weight).sum().backward()
        assert torch.equal(x.grad, weight)


@pytest.mark.compiled
def test_compiles_without_a_graph_break(compiler):
    x = torch.randn(4, 40)
    compiled = torch.compile(lambda x: mx_quantize(x, "mxfp4", 16, axis=None), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), mx_quantize(x, "mxfp4", 16, axis=None))


def test_stochastic_rounding_takes_a_seed():
    x = sample(8, 64)
    first, again, other = (mx_quantize(x, "mxfp4", rounding="stochastic", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert torch.equal(mx_quantize(torch.from_numpy(x), "mxfp4", rounding="stochastic", seed=1), torch.tensor(first))
    draws = {mx_quantize(x, "mxfp4", rounding="stochastic").tobytes() for _ in range(3)}
    assert len(draws) == 3


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every second": lambda x: x[::2, 1::2],
    "broadcast": lambda x: np.broadcast_to(x[0], (3, x.shape[1])),
    "0-d": lambda x: x[0, 0, ...],
    "empty": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
    "backwards": lambda x: x[::-1, ::-1],
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder("S")) if x.dtype.isbuiltin == 1 else x,
    "between other fields": lambda x: fields(x)["value"],
}
IN_PLACE = ("contiguous", "transposed", "every second", "broadcast", "0-d")


def fields(x):
    packed = np.zeros(x.shape, [("tag", np.int8), ("value", x.dtype)])
    packed["value"] = x
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writeable", [True, False])
def test_layouts_of_numpy(layout, dtype, writeable):
    x = LAYOUTS[layout](sample(6, 40, dtype=DTYPES[dtype][0]))
    x.flags.writeable = writeable and layout != "broadcast"
    before = x.tobytes()
    t = torch.from_numpy(x.astype(np.float32)).to(DTYPES[dtype][1])
    got = mx_quantize(x, "mxfp4", 16)
    assert isinstance(got, np.ndarray) and got.dtype == x.dtype and got.shape == x.shape
    assert np.array_equal(got.astype(np.float32), fake_quantize_mx(t, "mxfp4", 16).float().numpy())
    assert x.tobytes() == before and not np.shares_memory(got, x)
    if layout in IN_PLACE:
        assert as_torch(x).data_ptr() == x.ctypes.data and as_torch(x).dtype == t.dtype


class Named(np.ndarray):
    pass


def test_scalars_and_subclasses_of_numpy():
    got = mx_quantize(np.float32(1.3), "mxfp4")
    assert isinstance(got, np.float32) and got == np.float32(1.5)
    got = mx_quantize(np.array([1.3, 0.6], np.float32).view(Named), "mxfp4")
    assert type(got) is np.ndarray and got.tolist() == [1.5, 0.5]


class EagerTensor:
    """An array of an unsupported library."""


EagerTensor.__module__ = "tensorflow.python.framework.ops"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones(4), r"dtype float64 .* float32, float16 and bfloat16; cast it first, .* x.astype\('float32'\)"),
        (np.float64(1.0), "dtype float64"),
        (np.ones(4, np.int32), "dtype int32"),
        (np.array(["a"]), "dtype str"),
        (torch.ones(4, dtype=torch.float64), r"torch.float64 .* cast it first, for example with x.float\(\)"),
        (torch.eye(4).to_sparse(), "data must be a dense tensor, not one of layout torch.sparse_coo"),
        ([1.0, 2.0], r"a Python list: convert it first, .* numpy.asarray\(x, dtype='float32'\) or torch.tensor\(x\)"),
        ((1.0,), "a Python tuple"),
        (1.0, "a Python float"),
        (True, "a Python bool"),
        (None, "builtins.NoneType: taken are torch tensors, NumPy arrays and JAX arrays"),
        (EagerTensor(), r"tensorflow.python.framework.ops.EagerTensor: taken are .* numpy.asarray\(x\)"),
        (np.ma.masked_less(np.ones(4, np.float32), 0), "MaskedArray"),
    ],
)
def test_what_is_not_taken(data, message):
    for axis in (-1, None):
        with pytest.raises(MXError, match=message):
            mx_quantize(data, axis=axis)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "mxfp9"}, "unknown MX element format"),
        ({"format": (5, 11)}, "unknown MX element format"),
        ({"block_size": 0}, "block_size=0"),
        ({"axis": 1}, "axis=1 is out of range"),
        ({"scale_mode": "flor"}, "did you mean 'floor'"),
        ({"scale_exp_bits": 12}, "scale_exp_bits=12"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_bad_arguments(arguments, message):
    for x in (np.ones(4, np.float32), torch.ones(4)):
        with pytest.raises(MXError, match=message):
            mx_quantize(x, **arguments)
