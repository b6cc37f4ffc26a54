import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pychop import MXTensor, backend, get_backend, mx_quantize

X = [1.0, 2.4, -0.3, 7.0]
ARRAYS = {"numpy": lambda: np.array(X, np.float32), "torch": lambda: torch.tensor(X), "jax": lambda: jnp.array(X)}
TYPES = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array}


@pytest.fixture(autouse=True)
def _auto(monkeypatch):
    monkeypatch.setenv("chop_backend", "auto")


@pytest.mark.parametrize("given", ARRAYS)
@pytest.mark.parametrize("chosen", ["auto", *TYPES])
def test_the_backend_chooses_the_type_of_results(given, chosen):
    backend(chosen)
    lib = given if chosen == "auto" else chosen
    y = mx_quantize(ARRAYS[given](), "mxint8")
    assert get_backend() == chosen and isinstance(y, TYPES[lib]) and y.tolist() == [1.0, 2.375, -0.3125, 7.0]
    assert MXTensor(ARRAYS[given]()).backend == lib
    other = mx_quantize(ARRAYS[given](), "mxint8", backend="numpy")  # of one call
    assert isinstance(other, np.ndarray) and other.tolist() == y.tolist()


def test_bfloat16_goes_to_numpy_as_float32():
    y = mx_quantize(torch.tensor(X, dtype=torch.bfloat16), backend="numpy")
    assert y.dtype == np.float32 and y.tolist() == [1.0, 2.5, -0.3125, 7.0]


def test_the_environment_names_the_backend(monkeypatch):
    monkeypatch.setenv("chop_backend", "torch")
    assert get_backend() == "torch" and isinstance(mx_quantize(X), torch.Tensor)


def test_verbose_prints_the_choice(capsys):
    backend("numpy", 1)
    assert capsys.readouterr().out == "pt2mx.pychop: backend numpy\n"


def test_unknown_backend():
    with pytest.raises(MXError, match="unknown backend 'jx': did you mean 'jax'"):
        backend("jx")
