"""Rotations that are folded into the weights of decoders: what the float program computes, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.algorithms import Rotation, ScaleSearch
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.optimize import fold_rotation
from pt2mx.pt2e.optimize.fold_rotation import fold_rotations
from tests.language_models import exported_decoder

FOLDED = Rotation(online=False)
W4 = MXQuantizer.from_recipe("mxfp4_weight_only")
#: families with RMS norms, and how many of their layers have values that can be rotated, of two
FOLDABLE = {
    "llama": 2, "qwen2": 2, "qwen3": 2, "phi3": 2, "mistral": 2, "mixtral": 2, "gpt_oss": 2, "smollm3": 2,
    "qwen2_moe": 2, "qwen3_moe": 2, "mamba": 0, "mamba2": 0, "falcon_h1": 2, "lfm2": 1, "qwen3_next": 0, "jamba": 1,
    "recurrent_gemma": 1,
}  # fmt: skip
#: families whose residual stream cannot be rotated -> the reason
REFUSED = {
    "gpt2": r"h.0.ln_1: aten.layer_norm \(layer_norm\) subtracts the mean of each row",
    "gemma2": r"post_feedforward_layernorm: aten.mul.Tensor \(mul_\d+\) applies the gain of a norm to values that are",
    "gemma3": "post_feedforward_layernorm: aten.mul.Tensor .* applies the gain",
    "glm4": "post_mlp_layernorm: aten.mul.Tensor .* applies the gain",
    **dict.fromkeys(("falcon", "bloom", "opt", "gpt_neox", "gpt_neo", "gptj"), "layer_norm.* subtracts the mean"),
}
QUICK = ("llama", "gpt2")
SLOW = pytest.mark.slow


def of_families(families):
    return [name if name in QUICK else pytest.param(name, marks=SLOW) for name in families]


def graph_and_batch(family):
    """The float graph of a decoder, its gains and biases random, and a batch."""
    model, program = exported_decoder(family)
    graph = copy_sharing_tensors(program.module(check_guards=False))
    generator = torch.Generator().manual_seed(1)

    def varied(tensor):
        is_vector = tensor.dim() == 1 and tensor.is_floating_point()
        return tensor + torch.randn(tensor.shape, generator=generator) / 4 if is_vector else tensor

    map_tensors(graph, varied)
    ids = torch.randint(256, (2, 9), generator=generator)
    return graph, decoder.inputs(layers_of(model), torch.device("cpu"), ids)


def calls_of(graph):
    return [(node.name, node.target) for node in graph.graph.nodes if node.op == "call_function"]


def call(graph, batch):
    copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, batch)
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(graph(**copies))[0]


@pytest.fixture
def rotated_together(monkeypatch):
    """The `RotatedValues` that the test makes: the residual stream, then the values of each attention."""
    made = []

    class Noted(fold_rotation.RotatedValues):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(fold_rotation, "RotatedValues", Noted)
    return made


@pytest.mark.parametrize("family", of_families(FOLDABLE))
@pytest.mark.compiled_cases("llama")
def test_the_float_program_computes_the_same(family, rotated_together):
    graph, batch = graph_and_batch(family)
    expected, before = call(graph, batch), dict(graph.named_parameters(remove_duplicate=False))
    copies = {name: value.clone() for name, value in before.items()}
    folded = fold_rotations(graph, FOLDED, batch)
    logits = call(folded, batch)
    assert float((logits - expected).norm() / expected.norm()) < 1e-5
    assert calls_of(folded) == calls_of(graph)
    assert all(torch.equal(value, copies[name]) for name, value in before.items())
    after = dict(folded.named_parameters(remove_duplicate=False))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    embedding = next(name for name in after if "embed" in name)
    assert torch.equal(after[embedding], hadamard(before[embedding], 64, -1))
    head = next(name for name in after if name.endswith("lm_head.weight"))
    assert {embedding, head} <= changed
    neutral = [value for name, value in after.items() if "norm" in name and name in changed]
    assert neutral and all(value.unique().numel() == 1 for value in neutral)
    assert len(rotated_together) == 1 + FOLDABLE[family]


@pytest.mark.compiled
def test_what_each_weight_becomes():
    graph, batch = graph_and_batch("llama")
    before = dict(graph.named_parameters())
    after = dict(fold_rotations(graph, Rotation(size=8, online=False), batch).named_parameters())

    def of(values, name):
        return values[f"model.model.layers.0.{name}.weight"]

    gain = of(before, "input_layernorm")
    assert torch.equal(of(after, "input_layernorm"), torch.ones(64))
    assert torch.equal(of(after, "self_attn.q_proj"), hadamard(of(before, "self_attn.q_proj") * gain, 8, -1))
    rotated = hadamard(of(before, "self_attn.v_proj") * gain, 8, -1)
    torch.testing.assert_close(of(after, "self_attn.v_proj"), hadamard(rotated, 8, 0))
    both = hadamard(hadamard(of(before, "self_attn.o_proj"), 8, 0), 8, -1)
    torch.testing.assert_close(of(after, "self_attn.o_proj"), both)
    assert torch.equal(of(after, "mlp.down_proj"), hadamard(of(before, "mlp.down_proj"), 8, 0))
    head = before["model.lm_head.weight"] * before["model.model.norm.weight"]
    assert torch.equal(after["model.lm_head.weight"], hadamard(head, 8, -1))


@pytest.mark.compiled
@pytest.mark.parametrize("family", of_families(REFUSED))
def test_residual_streams_that_no_rotation_of_weights_allows(family):
    graph, _ = graph_and_batch(family)
    with pytest.raises(MXError, match=REFUSED[family]):
        fold_rotations(graph, FOLDED)
    with pytest.warns(UserWarning, match=f"stay without rotations: .*{REFUSED[family]}"):
        assert fold_rotations(graph, Rotation(online=False, strict=False)) is graph


class Norm(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Tiny(nn.Module):
    """A layer of attention and a head. `gated` multiplies the result of attention, `normed` divides it, and `twice`
    sums the values twice. `part` changes the result of the layer."""

    def __init__(self, width=64, tied=False, gated=False, twice=False, normed=False, part=lambda model, x: x):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.last = nn.Embedding(20, width), Norm(width), Norm(width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 20, bias=False)
        self.inner = Norm(width) if normed else nn.Identity()
        self.gated, self.twice, self.part = gated, twice, part
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):  # (B, S) -> (B, S, 20)
        x = self.embedding(ids)
        y = self.norm(x)
        query, value = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.value))
        y = attend(query, query, value)
        if self.twice:
            y = y + attend(-query, query, value.contiguous())
        y = self.inner(y.transpose(1, 2).flatten(-2))
        x = x + self.part(self, self.out(y * self.query(x).sigmoid() if self.gated else y))
        return self.head(self.last(x))


IDS = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(0))


def exported(**fields):
    return torch.export.export(Tiny(**fields).eval(), (IDS,)).module()


@pytest.mark.compiled_cases("fields1-*", "fields2-*", "fields5-*")
@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 16),
        ({"tied": True}, 16),
        ({"twice": True}, 16),
        ({"gated": True}, 0),
        ({"width": 48}, 4),
        ({"width": 72}, 0),
        ({"normed": True}, 16),
    ],
)
def test_programs_without_a_cache(fields, size):
    """Gated values, and heads of 18 values, stay; the residual stream is rotated in blocks of a power of two."""
    graph = exported(**fields)
    folded = pt2mx.optimize(graph, W4, algorithms=(FOLDED, ScaleSearch()), batches=[IDS])
    rotated = {weight.weight: weight.rotated for weight in pt2mx.optimization_report(folded).weights}
    width = fields.get("width", 64)
    assert rotated["embedding.weight"] == width & -width
    float_one = fold_rotations(graph, FOLDED, IDS)
    torch.testing.assert_close(float_one(IDS), graph(IDS), rtol=1e-4, atol=1e-5)
    rows = hadamard(graph.out.weight, width & -width, 0)
    columns = rows * (graph.inner.weight if fields.get("normed") else 1)
    expected = hadamard(columns, size, -1) if size else columns
    torch.testing.assert_close(float_one.out.weight, expected)
    if fields.get("tied"):
        assert torch.equal(float_one.embedding.weight, hadamard(graph.embedding.weight, 64, -1))
        head = hadamard(graph.embedding.weight * graph.last.weight, 64, -1)
        assert torch.equal(float_one.head.weight, head)
    assert "hadamard" not in folded.code


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda model, x: x.relu(), "aten.relu .* writes values that no weight rotates"),
        (lambda model, x: x * x.sigmoid(), "aten.mul.Tensor .* writes values that no weight rotates"),
        (lambda model, x: model.norm(x), "norm: aten.mul.Tensor .* applies the gain of a norm"),
        (lambda model, x: x.cumsum(-1), "aten.cumsum"),
        (lambda model, x: x.roll(1, -1), "aten.roll"),
        (
            lambda model, x: x * model.norm.weight.sum(),
            r"aten.sum \(sum_1\) reads the gain of a norm, norm_weight",
        ),
        (lambda model, x: x + model.embedding.weight.mean(), "aten.add.Tensor .* writes values"),
    ],
)
def test_what_prevents_it(part, message):
    with pytest.raises(MXError, match=message):
        fold_rotations(exported(part=part), FOLDED)


def test_other_programs_are_refused():
    graph = torch.export.export(nn.Linear(64, 8), (torch.ones(1, 64),)).module()
    with pytest.raises(MXError, match="the program looks up no embedding: rotations are folded into the weights of d"):
        pt2mx.optimize(graph, W4, [torch.ones(1, 64)], algorithms=FOLDED)
    narrow = torch.export.export(nn.Sequential(nn.Embedding(20, 18), nn.Linear(18, 20)), (IDS,)).module()
    with pytest.raises(MXError, match=r"0: aten.embedding .* has rows of 18 values, which no block of 4 or more div"):
        fold_rotations(narrow, FOLDED)


def test_a_program_that_computes_something_else_is_refused(monkeypatch):
    class Wrong(fold_rotation.RotatedValues):
        def __init__(self, *args):
            super().__init__(*args)
            self.changes.pop()

    monkeypatch.setattr(fold_rotation, "RotatedValues", Wrong)
    with pytest.raises(MXError, match=r"the program gives other outputs \(.* of their norm\): leave Rotation"):
        pt2mx.optimize(exported(), W4, iter([IDS]), algorithms=(FOLDED, ScaleSearch()))
