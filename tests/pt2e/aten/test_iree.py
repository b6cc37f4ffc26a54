"""Lowered programs in IREE, compiled for this CPU. Slow, and only where the extra `iree` is installed."""

import numpy as np
import pytest
import torch
from torch import nn

from pt2mx import lower_to_aten
from tests.compare import sqnr
from tests.pt2e.aten.programs import LEAST, identity, minilm, resnet18
from tests.pt2e.aten.test_lower import Product, program_of, quantizer_of, run


@pytest.fixture
def in_iree():
    """Return a function that compiles a program, and returns a function that runs it."""
    aot = pytest.importorskip("iree.turbine.aot", reason="needs pip install 'pt2mx[iree]'")
    from iree import runtime

    def compiled(program):
        output = aot.export(program)
        output.session.set_flags("--iree-llvmcpu-target-cpu=host")
        binary = output.compile(save_to=None, target_backends=("llvm-cpu",)).map_memory()
        config = runtime.Config("local-task")
        module = runtime.load_vm_module(runtime.VmModule.wrap_buffer(config.vm_instance, binary), config)
        return lambda *inputs: torch.from_numpy(np.array(module.main(*(x.numpy() for x in inputs)).to_host()))

    return compiled


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("text", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"])
def test_quantized_tensors_have_their_bits(text, in_iree):
    layer, (x,) = identity()
    lowered = lower_to_aten(program_of(layer, (x,), quantizer_of(text, text)), weights="bytes")
    assert torch.equal(in_iree(lowered)(x), run(lowered, x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):  # (B, T, 64) -> (B, T, 64)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_whose_operands_are_squeezed(in_iree):
    x = torch.randn(4, 20, 64)
    lowered = lower_to_aten(program_of(Attention(), (x,), "mxfp8"), weights="bytes")
    assert sqnr(in_iree(lowered)(x), run(lowered, x)) >= 100


def test_dynamic_sizes(in_iree):
    shapes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=600)},)
    lowered = lower_to_aten(program_of(Product(), (torch.randn(3, 33, 40),), "mxfp8", shapes), weights="bytes")
    call = in_iree(lowered)
    for sizes in ((1, 1), (2, 31), (4, 65)):
        x = torch.randn(*sizes, 40)
        assert sqnr(call(x), run(lowered, x)) >= 40


@pytest.mark.parametrize("make", [minilm, resnet18])
@pytest.mark.parametrize("recipe", LEAST)
def test_whole_models_agree(make, recipe, in_iree):
    torch.manual_seed(0)
    model, inputs = make()
    lowered = lower_to_aten(program_of(model, inputs, recipe), weights="bytes")
    assert sqnr(in_iree(lowered)(*inputs), run(lowered, *inputs)) >= LEAST[recipe]
