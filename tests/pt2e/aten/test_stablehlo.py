"""Lowered programs in JAX, by torchax. Slow, and only where the extra `stablehlo` is installed."""

import numpy as np
import pytest
import torch
from torch import nn

from pt2mx import lower_to_aten
from tests.compare import sqnr
from tests.pt2e.aten.programs import LEAST, identity, minilm, resnet18
from tests.pt2e.aten.test_lower import program_of, quantizer_of, run
from tests.pt2e.exporters.models import MODELS, example


@pytest.fixture
def in_jax(monkeypatch):
    """Return a function that runs a program in JAX."""
    export = pytest.importorskip("torchax.export", reason="needs pip install 'pt2mx[stablehlo]'")
    import jax
    from torchax.ops import mappings

    monkeypatch.setitem(mappings.NUMPY_UNSUPPORTED_DTYPES, torch.float8_e8m0fnu, jax.numpy.float8_e8m0fnu)

    def call(program, *inputs):
        weights, exported = export.exported_program_to_stablehlo(program)
        (y,) = exported.call(weights, ([jax.numpy.asarray(x.numpy()) for x in inputs],))
        return torch.from_numpy(np.array(y))

    with jax.enable_x64(True):
        yield call


@pytest.mark.slow
@pytest.mark.parametrize("text", ["mxfp8", "mxfp6_e3m2", "mxfp4", "mxfp4(mse)", "mxint8", "nvfp4"])
def test_quantized_tensors_have_their_bits(text, in_jax):
    layer, (x,) = identity()
    lowered = lower_to_aten(program_of(layer, (x,), quantizer_of(text, text)))
    assert torch.equal(in_jax(lowered, x), run(lowered, x))


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = MODELS["llama"]()

    def forward(self, ids):  # (B, T) -> (B, T, vocabulary)
        return self.model(input_ids=ids, use_cache=False).logits


def llama():
    return Logits(), (example("llama")["input_ids"],)


@pytest.mark.slow
@pytest.mark.parametrize("make", [minilm, resnet18, llama])
@pytest.mark.parametrize("recipe", LEAST)
def test_whole_models_agree(make, recipe, in_jax):
    torch.manual_seed(0)
    model, inputs = make()
    lowered = lower_to_aten(program_of(model, inputs, recipe))
    assert sqnr(in_jax(lowered, *inputs), run(lowered, *inputs)) >= LEAST[recipe]
