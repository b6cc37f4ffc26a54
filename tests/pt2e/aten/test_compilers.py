"""Lowered programs in compilers of others. Slow, and only where the extra of the compiler is installed."""

import pytest
import torch
from torch import nn

from pt2mx import lower_to_aten
from tests.compare import sqnr
from tests.models import module_of, projected
from tests.pt2e.aten.compilers import COMPILERS, minilm, resnet18
from tests.pt2e.aten.test_lower import program_of, quantizer_of, run
from tests.pt2e.exporters.models import MODELS, example

pytestmark = pytest.mark.slow
#: recipe -> the least SQNR of outputs, in dB: sums in another order move activations to neighbouring codes
LEAST = {"mxfp4_weight_only": 100, "mxfp8": 20, "mxint8": 20}


@pytest.fixture(params=COMPILERS)
def both(request):
    """Return a function that lowers a program, and returns the calls of what a compiler made of it, and in torch."""
    compiler = COMPILERS[request.param]
    pytest.importorskip(compiler.module, reason=f"needs pip install 'pt2mx[{compiler.extra}]'", exc_type=ImportError)

    def compiled(program):
        lowered = lower_to_aten(program, **compiler.options)
        return compiler.compile(lowered), lambda *inputs, **named: run(lowered, *inputs, **named)

    return compiled


@pytest.mark.parametrize("text", ["mxfp8", "mxfp6", "mxfp4", "mxfp4(mse)", "mxint8", "nvfp4"])
def test_quantized_tensors_have_their_bits(text, both):
    """Products with the identity matrix, of all magnitudes whose scales are normal numbers."""
    layer = nn.Linear(64, 64, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.randn(200, 64) * 2.0 ** torch.randint(-100, 120, (200, 1))
    x[0] = 0
    call, in_torch = both(program_of(layer, (x,), quantizer_of(text, text)))
    assert torch.equal(call(x), in_torch(x))


def attention(self, x):  # (B, T, 64) -> (B, T, 64)
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind()
    return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_whose_operands_are_squeezed(both):
    x = torch.randn(4, 20, 64)
    call, in_torch = both(
        program_of(module_of(attention, qkv=nn.Linear(64, 192), out=nn.Linear(64, 64)), (x,), "mxfp8")
    )
    assert sqnr(call(x), in_torch(x)) >= 100


@pytest.mark.parametrize("both", ["IREE"], indirect=True)
def test_dynamic_sizes(both):
    shapes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=600)},)
    call, in_torch = both(program_of(projected(), (torch.randn(3, 33, 40),), "mxfp8", shapes))
    for sizes in ((1, 1), (2, 31), (4, 65)):
        x = torch.randn(*sizes, 40)
        assert sqnr(call(x), in_torch(x)) >= 40


class Normed(nn.Module):
    """A batch norm that no convolution absorbs."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x):  # (B, 8, H, W) -> (B, 4, H - 2, W - 2)
        return self.conv(torch.relu(self.norm(x)))


def test_batch_norms(both):
    x = torch.randn(2, 8, 5, 5)
    call, in_torch = both(program_of(Normed(), (x,), "mxfp4_weight_only"))
    assert sqnr(call(x), in_torch(x)) >= 100


@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp8"])
@pytest.mark.parametrize("both", ["IREE"], indirect=True)
def test_a_decoder_reads_a_prompt_and_tokens(recipe, both):
    """One program for all sizes, which changes its cache in place."""
    from tests.language_models import decoder_by_recipe

    program = decoder_by_recipe(recipe, "llama").program
    call, in_torch = both(program)
    tokens, filled, slots = torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(0)), 0, 12
    cache = [torch.zeros(3, 2, slots, 16) for _ in range(4)]  # keys and values of two layers
    for _ in range(4):
        last = filled + tokens.shape[1]
        positions, mask = torch.arange(filled, last).repeat(3, 1), torch.ones(3, slots, dtype=torch.long)
        given = tokens, positions, mask, torch.tensor([filled]), torch.tensor([tokens.shape[1] - 1])
        theirs = [tensor.clone() for tensor in cache]
        y = call(*given, *theirs)
        names = program.example_inputs[1]
        expected = in_torch(**dict(zip(names, (*given, cache[:2], cache[2:]), strict=True)))
        assert sqnr(y, expected) >= LEAST[recipe]
        assert min(map(sqnr, theirs, cache)) >= LEAST[recipe]
        tokens, filled = expected.argmax(-1), last
        assert torch.equal(y.argmax(-1), tokens)


def logits_forward(self, ids):  # (B, T) -> (B, T, vocabulary)
    return self.model(input_ids=ids, use_cache=False).logits


def llama():
    return module_of(logits_forward, model=MODELS["llama"]()), (example("llama")["input_ids"],)


@pytest.mark.parametrize("make", [minilm, resnet18, llama])
@pytest.mark.parametrize("recipe", LEAST)
def test_whole_models_agree(make, recipe, both):
    model, inputs = make()
    call, in_torch = both(program_of(model, inputs, recipe))
    assert sqnr(call(*inputs), in_torch(*inputs)) >= LEAST[recipe]
