"""Weights that multiply one input share the scale of their tensors: in every stage of the flow, and in files."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as convert_of_torchao
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as prepare_of_torchao

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.fx.graph.constants import computed_from
from pt2mx.pt2e.flow.shared_scales import connected, share_tensor_scales
from pt2mx.pt2e.observe.tensor_scales import shared_amax
from tests.flow import calibrated, exported
from tests.graph import calls, count
from tests.models import module_of

ops = torch.ops.pt2mx
X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
FORMATS = ("nvfp4", "nvfp4(four_six)", "fp4_e2m1{16}(e4m3_f32_divisor)")


class Block(nn.Module):
    """Queries, keys and values of x, with weights of different magnitude, and a projection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o = nn.Linear(16, 32)
        with torch.no_grad():
            self.k.weight *= 4
            self.v.weight *= 0

    def forward(self, x):
        return self.o(self.q(x).mean(-1, keepdim=True) + self.k(x) * self.v(x).cos())


def quantizer(weight="nvfp4", activation=None):
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation))


def scale_of(*weights, spec="nvfp4"):
    return pt2mx.tensor_scale_mx(torch.stack([weight.detach().abs().amax() for weight in weights]), spec)


def scales(model):
    return {name: tensor.item() for name, tensor in model.named_buffers() if name.endswith("weight_tensor_scale")}


@pytest.mark.diagonal
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("activation", [None, "nvfp4"])
@pytest.mark.parametrize("spec", FORMATS)
def test_siblings_share_the_scale_of_the_largest_value(spec, activation, fold):
    block = Block().eval()
    prepared = calibrated(exported(block, X), quantizer(spec, activation and spec), X)
    converted = pt2mx.convert_pt2e(prepared, fold_quantize=fold)
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        want = prepared(X)
        assert torch.equal(converted(X), want)
        shared, own = scale_of(block.k.weight, spec=spec), scale_of(block.o.weight, spec=spec)
        if fold:
            state = converted.state_dict()
            values = {f"{name}.weight_tensor_scale": shared.item() for name in "qkv"}
            assert scales(converted) == {**values, "o.weight_tensor_scale": own.item()}
            for name, t in (("q", shared), ("k", shared), ("o", own)):
                weight = getattr(block, name).weight
                scale, data = pt2mx.quantize_mx(weight, spec, tensor_scale=t)
                assert torch.equal(state[f"{name}.weight_data"], data)
                assert torch.equal(state[f"{name}.weight_scale"].view(torch.uint8), scale.view(torch.uint8))
        lowered = pt2mx.lower_to_inductor(converted)
        assert len(calls(lowered, ops.linear_mx.default)) == 2  # q, k and v in one
        torch.testing.assert_close(lowered(X), want, rtol=1e-5, atol=1e-5)


def test_the_amax_of_several_tensors():
    tensors = torch.tensor([1.0, -torch.inf]), torch.tensor([[-2.0, torch.nan]]), torch.zeros(3), torch.empty(0, 4)
    assert shared_amax(tensors).equal(torch.tensor(2.0))
    assert shared_amax(tensor.bfloat16() for tensor in tensors).equal(torch.tensor(2.0))


def test_an_infinite_value_does_not_count():
    block = Block().eval()
    with torch.no_grad():
        block.k.weight[0, 0], block.k.weight[1, 0] = torch.inf, 9.0
        prepared = calibrated(exported(block, X), quantizer(), X)
        with pytest.warns(UserWarning, match="NaN or Inf in k.weight"):
            converted = pt2mx.convert_pt2e(prepared)
    assert set(scales(converted).values()) == {scale_of(torch.tensor(9.0)).item(), scale_of(block.o.weight).item()}


def test_training_uses_the_current_values():
    block = Block()
    qat = pt2mx.prepare_qat_pt2e(exported(block, X), quantizer())
    optimizer = torch.optim.SGD(qat.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        qat(X).square().mean().backward()
        assert all(parameter.grad is not None for parameter in qat.parameters())
        optimizer.step()
    with torch.no_grad():
        qat.get_parameter("v.weight")[0, 0] = 50.0
    trained, copied = pt2mx.convert_pt2e(qat), copy.deepcopy(qat)
    values = scales(trained)
    t = scale_of(torch.tensor(50.0))
    assert {values[f"{name}.weight_tensor_scale"] for name in "qkv"} == {t.item()}
    with torch.no_grad():
        want = qat.eval()(X)
        assert torch.equal(trained(X), want) and torch.equal(copied.eval()(X), want)
        copied.get_parameter("v.weight").zero_()
        assert not torch.equal(copied(X), want)
        copied.load_state_dict(qat.state_dict())
        assert torch.equal(copied(X), want)
        other = {"v.weight": torch.full_like(qat.get_parameter("v.weight"), 99.0)}
        far = functional_call(qat, other, (X,))
        by_hand = copy.deepcopy(block)
        by_hand.load_state_dict({**{n: p for n, p in qat.state_dict().items() if n in block.state_dict()}, **other})
        shared = scale_of(other["v.weight"])
        for layer, t in ((by_hand.q, shared), (by_hand.k, shared), (by_hand.v, shared), (by_hand.o, None)):
            layer.weight.copy_(pt2mx.fake_quantize_mx(layer.weight, "nvfp4", tensor_scale=t))
        assert torch.equal(far, by_hand(X))
    # the gradient is straight through
    weight = qat.get_parameter("q.weight")
    (gradient,) = torch.autograd.grad(qat(X).sum(), weight)
    assert gradient.isfinite().all() and gradient.any()


@pytest.mark.compiled
def test_the_magnitude_of_many_siblings_is_computed_once():
    # many layers of one input
    experts = module_of(
        lambda self, x: sum(expert(x) for expert in self.experts),
        experts=nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(64)),
    )
    model, x = experts, X[:, :16]
    qat = pt2mx.prepare_qat_pt2e(exported(model, x), quantizer())
    assert count(qat, torch.ops.aten.abs.default) == 64
    converted = pt2mx.convert_pt2e(qat, fold_quantize=False)
    assert count(converted, torch.ops.aten.abs.default) == 64
    assert torch.equal(converted(x), qat(x))
    t = scale_of(*(expert.weight for expert in model.experts)).item()
    assert scales(pt2mx.convert_pt2e(qat)) == {f"experts.{i}.weight_tensor_scale": t for i in range(64)}


@pytest.mark.compiled
def test_training_compiles():
    qat = pt2mx.prepare_qat_pt2e(exported(Block(), X), quantizer())
    want = qat(X)
    torch.testing.assert_close(torch.compile(qat, fullgraph=True, backend="aot_eager")(X), want)


@pytest.mark.compiled_except("True")
@pytest.mark.parametrize("qat", [False, True])
def test_a_prepared_model_can_be_exported_and_copied(qat, tmp_path):
    prepared = (pt2mx.prepare_qat_pt2e if qat else pt2mx.prepare_pt2e)(exported(Block().eval(), X), quantizer())
    with torch.no_grad():
        prepared(X)
        pt2mx.enable_fake_quant(prepared)
        pt2mx.disable_observer(prepared)
        want = prepared(X)
        torch.export.save(torch.export.export(prepared, (X,)), tmp_path / "prepared.pt2")
        again = torch.export.load(tmp_path / "prepared.pt2").module()
        for model in (again, copy.deepcopy(prepared)):
            assert torch.equal(model(X), want)


class Cases(nn.Module):
    """Weights that share no scale with others, and a weight that connects two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1)
        self.batched1, self.batched2 = (nn.Parameter(torch.randn(2, 16, 16)) for _ in range(2))
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.embedding = nn.Embedding(16, 16)
        self.a.weight = self.embedding.weight

    def forward(self, x, ids):  # (2, 16, 16)
        x = self.conv1(x) + self.conv2(x)
        x = x @ self.batched1 + x @ self.batched2
        y = self.a(x) + x @ self.b.weight.mT.contiguous() + x @ (self.c.weight * x.mean()).mT
        return self.a(y) + self.c(y) + self.embedding(ids)


def test_only_matrices_of_one_input_and_spec_share():
    cases, x, ids = Cases().eval(), torch.randn(2, 16, 16), torch.arange(16)
    prepared = calibrated(exported(cases, x, ids), quantizer(), x, ids)
    observed = {}
    for node in prepared.graph.find_nodes(op="call_module"):
        group = [one for amax in node.args[1:] for one in computed_from(amax) if one.op == "get_attr"]
        observed.setdefault(str(node.args[0].target), set()).add(tuple(sorted(str(one.target) for one in group)))
    tied = "embedding.weight"
    want = {"conv1.weight", "conv2.weight", "batched1", "batched2"}
    assert {name for name, siblings in observed.items() if siblings == {()}} >= want
    assert observed["c.weight"] == observed[tied] == {("c.weight", tied)}, observed
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        assert torch.equal(converted(x, ids), prepared(x, ids))


def test_modules_keep_scales_of_their_own():
    torch.manual_seed(0)
    # two layers, each with keys and values of one input
    layers = module_of(
        lambda self, x: sum(layer["k"](x) * layer["v"](x) for layer in self.layers),
        layers=nn.ModuleList(nn.ModuleDict({n: nn.Linear(32, 32) for n in ("k", "v")}) for _ in range(2)),
    )
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(layers.eval(), X), quantizer()))
    values = scales(converted)
    of_layers = [{values[f"layers.{i}.{name}.weight_tensor_scale"] for name in "kv"} for i in range(2)]
    assert len(of_layers[0]) == len(of_layers[1]) == 1 and of_layers[0] != of_layers[1]


def test_connected():
    pairs = ("x", 1), ("y", 2), ("z", 3), ("y", 1), ("z", 3)
    assert connected(pairs) == {1: [2, 1], 2: [2, 1], 3: [3]}


class InSubgraph(nn.Module):
    """A block in a subgraph, which reads the weights as operands."""

    def __init__(self, kind):
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x):
        if self.kind == "cond":
            return torch.cond(x.sum() > 0, lambda x: self.block(x), lambda x: self.block(2 * x), (x,))
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.block(x.sin()).float() * 2
        with torch.no_grad():
            y = self.block(x.sin())
        return y * 2


@pytest.mark.compiled_except("cond")
@pytest.mark.parametrize("kind", ["no_grad", "autocast", "cond"])
def test_siblings_in_subgraphs(kind):
    model = InSubgraph(kind).eval()
    prepared = calibrated(exported(model, X), quantizer(), X)
    pt2mx.enable_fake_quant(prepared)
    t = scale_of(model.block.k.weight)
    with torch.no_grad():
        want, converted = [prepared(x) for x in (X, -X)], pt2mx.convert_pt2e(prepared)
        assert all(torch.equal(converted(x), y) for x, y in zip((X, -X), want, strict=True))
        assert {scales(converted)[f"block.{name}.weight_tensor_scale"] for name in "qkv"} == {t.item()}
        torch.testing.assert_close(pt2mx.lower_to_inductor(converted)(X), want[0], rtol=1e-5, atol=1e-5)


class Two(Block):
    def forward(self, x, y):
        return self.q(x), self.k(y)


@pytest.mark.parametrize(("spec", "is_changed"), [("mxfp4", False), ("nvfp4", True)])
def test_a_graph_without_tensor_scales_does_not_change(spec, is_changed):
    """torchao observes an input before the next one."""
    graph = exported(Two().eval(), X, X)
    prepared = prepare_of_torchao(graph, quantizer(spec, spec))
    before = list(prepared.graph.nodes)
    share_tensor_scales(prepared)
    assert (list(prepared.graph.nodes) != before) == is_changed


def test_torchaos_convert_folds_the_shared_scale():
    prepared = calibrated(exported(Block().eval(), X), quantizer(), X)
    want = pt2mx.convert_pt2e(prepared)
    assert scales(convert_of_torchao(copy.deepcopy(prepared))) == scales(want)


@pytest.mark.parametrize("qat", [False, True])
def test_the_report_measures_with_the_shared_scale(qat):
    """With the scale of the larger weight, fewer of the small values remain."""
    block = Block().eval()
    with torch.no_grad():
        block.k.weight *= 2**15
    graph = exported(block, X)
    prepared = (pt2mx.prepare_qat_pt2e if qat else pt2mx.prepare_pt2e)(graph, quantizer())
    if not qat:
        prepared(X)
    weight = block.q.weight.detach()
    rounded = pt2mx.fake_quantize_mx(weight, "nvfp4", tensor_scale=scale_of(block.k.weight))
    sqnr = float(10 * torch.log10(weight.square().sum() / (weight - rounded).square().sum()))
    assert 17 < sqnr < 18  # 19.9 with a scale of its own
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        row = next(row for row in pt2mx.quantization_report(model).operators if row.module == "q")
        assert row.operands[1].statistics.sqnr == pytest.approx(sqnr, abs=1e-3)
