"""`mx_quantize` and `MXTensor` against pychop 0.6.2: its NumPy backend, which uses the block size."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pychop import MXQuantizerSTE, MXTensor, create_mx_spec, mx_quantize
from tests.golden import GOLDEN, OF_PYCHOP

RECORDED = np.load(Path(__file__).with_name("recorded.npz"))
ENTRIES = json.loads(bytes(RECORDED["manifest_json"]))


def arguments(entry):
    format = entry["format"] if isinstance(entry["format"], str) else tuple(entry["format"])
    return format, entry["block_size"], *entry["scale"]


def test_values_are_those_of_pychop():
    """Formats by name and by widths, to 16 bits, in blocks of several sizes, with scales of several widths."""
    for i, entry in enumerate(ENTRIES):
        x, want = RECORDED[f"in/{entry['input']}"], RECORDED[str(i)]
        got = mx_quantize(x, *arguments(entry))
        assert got.dtype == np.float32 and np.array_equal(got, want), entry
        if i % 5 == 0:
            assert np.array_equal(mx_quantize(torch.from_numpy(x), *arguments(entry)).numpy(), want), entry
            assert np.array_equal(mx_quantize(jnp.asarray(x), *arguments(entry)), want), entry
    assert len(ENTRIES) == 200


def test_golden_values_of_pychop():
    for entry in OF_PYCHOP:
        x, want = (GOLDEN[key] for key in ("in/" + entry["input"], entry["dq"]))
        got = mx_quantize(x, "mx" + entry["fmt"], entry["block"])
        assert np.array_equal(got.reshape(want.shape), want, equal_nan=True), entry
    assert len(OF_PYCHOP) == 67


#: statistics that pychop's documentation names, and pychop 0.6.2 does not give
MEMORY = ("fp16_memory_mb", "mx_memory_mb", "memory_saved_vs_fp16")


def test_statistics_are_those_of_pychop():
    for entry in ENTRIES:
        statistics = MXTensor(RECORDED[f"in/{entry['input']}"], *arguments(entry)).statistics()
        fp16, mx, saved = (statistics.pop(name) for name in MEMORY)
        assert statistics | {"original_shape": list(statistics["original_shape"])} == entry["statistics"]
        assert fp16 / mx == pytest.approx(statistics["compression_ratio_fp16"])
        assert saved == pytest.approx(100 - 100 * mx / fp16)


def test_memory_is_that_of_pychops_documentation():
    """Of 4096 x 4096 numbers in float16, "32 MB"; here of a 16th of them."""
    statistics = MXTensor(np.zeros((1024, 1024), np.float16), format="mxfp8_e4m3").statistics()
    assert [statistics[name] for name in MEMORY] == [32 / 16, 16.5 / 16, 48.4375]


def test_a_spec_quantizes_in_its_own_block_size():
    x = RECORDED["in/cube"]
    spec = create_mx_spec(3, 4, 16, 5)
    assert np.array_equal(mx_quantize(x, spec), mx_quantize(x, (3, 4), 16, 5))
    assert np.array_equal(MXTensor(x, spec, 64).dequantize(), mx_quantize(x, spec))


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ([1.0, 2.4, -0.3], "float64"),
        ([[1, 2], [3, 5]], "float32"),
        (2.4, "float64"),
        (np.arange(5), "float32"),
        (np.linspace(-1, 1, 9), "float64"),
        (np.linspace(-1, 1, 9, dtype=np.float16), "float16"),
        (np.linspace(-1, 1, 9, dtype=">f4"), "float32"),
        (torch.linspace(-1, 1, 9, dtype=torch.float64), "float64"),
        (torch.linspace(-1, 1, 9, dtype=torch.bfloat16), "bfloat16"),
        (torch.arange(5), "float32"),
        (lambda: jnp.arange(5), "float32"),
        (lambda: jnp.linspace(-1, 1, 9), "float32"),
    ],
)
def test_every_kind_of_number_is_cast_and_given_back(data, dtype):
    data = data() if callable(data) else data  # JAX takes its devices with the first array
    y = mx_quantize(data, "mxfp6_e2m3")
    assert str(y.dtype).removeprefix("torch.") == dtype
    expected = mx_quantize(np.array(data.tolist() if hasattr(data, "tolist") else data, np.float32), "mxfp6_e2m3")
    assert y.tolist() == expected.tolist()


def test_float64_beyond_float32_makes_its_block_nan():
    y = mx_quantize(np.array([1.0, 1e39, 1.0, 1.0]), "mxint8", 2)
    assert np.isnan(y[:2]).all() and y[2:].tolist() == [1.0, 1.0]


def test_gradients_pass_straight_through():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (mx_quantize(x, (5, 10), scale_exp_bits=5) * torch.arange(5)).sum().backward()
    assert x.grad.tolist() == [[0, 1, 2, 3, 4]] * 3
    quantizer = MXQuantizerSTE("mxfp4_e2m1")
    gradient = jax.jit(jax.grad(lambda v: (quantizer(v) * jnp.arange(5)).sum()))(jnp.ones(5))
    assert gradient.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], "mxfp9"), "unknown format 'mxfp9': did you mean 'mxfp"),
        (([1.0], 5), "format=5 must be a key of MX_FORMATS"),
        (([1.0], (1, 2, 3)), "must be a key of MX_FORMATS"),
        (([1.0], (8, 7)), "1 to 7 exponent bits and at most 16 bits"),
        (([1.0], "mxint8", 0), "block_size=0 must be an integer of at least 1"),
        (([1.0], "mxint8", 32, 12), "scale_exp_bits=12 must be an integer from 1 to 11"),
        (([1.0 + 2j],), "dtype complex128"),
        ((["a"],), "cannot quantize an array of dtype"),
        (([[1.0], [1.0, 2.0]],), "it is no array of numbers"),
    ],
)
def test_bad_arguments(arguments, message):
    for call in (mx_quantize, MXTensor):
        with pytest.raises(MXError) as error:
            call(*arguments)
        assert message in str(error.value)


def test_data_without_values():
    t = MXTensor(np.empty((0, 4)), "mxfp4_e2m1")
    assert t.dequantize().shape == (0, 4)
    statistics = t.statistics()
    assert statistics["num_blocks"] == 0 and statistics["bits_per_element"] == 4.25
    assert [statistics[name] for name in MEMORY] == [0, 0, 73.4375]
    assert repr(t) == "MXTensor(backend=numpy, shape=(0, 4), format=MXFP4_E2M1)"
