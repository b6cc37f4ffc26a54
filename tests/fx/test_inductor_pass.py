import hashlib
import operator
import re
import uuid
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import pt2mx
from pt2mx import LoweringPass, lower_to_inductor
from pt2mx.fx import inductor_pass
from pt2mx.kernels.select import USES
from tests.flow import convert
from tests.graph import called
from tests.models import IDS, module_of

pytestmark = pytest.mark.usefixtures("compiler")


class Recording(LoweringPass):
    def __init__(self):
        self.graphs = []

    def uuid(self):
        return uuid.uuid4().hex  # so that it runs whatever is cached

    def __call__(self, graph):
        super().__call__(graph)
        self.graphs.append([str(node.target) for node in graph.nodes if node.op == "call_function"])


def compiled(model, own, args, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        return run_and_get_code(torch.compile(model, options={"pre_grad_custom_pass": own, **options}), *args)


def packed_calls(codes):
    return len(re.findall(r"^ +PreparedLinear_\w+\(|torch\.ops\.pt2mx\.linear_mx\.default\(", "".join(codes), re.M))


def test_a_converted_model_gets_the_lowered_graph(converted, monkeypatch):
    monkeypatch.setitem(USES, "quantize the result of a matmul", {})  # as on most
    own = Recording()
    got, codes = compiled(converted, own, (IDS,))
    torch.testing.assert_close(got, converted(IDS), rtol=1e-3, atol=1e-3)
    # the pass dequantizes the weight whose codes lowering would transpose, and merges no layers of one input
    assert packed_calls(codes) == 3 and "dequantize_mx" not in re.findall(r"torch\.ops\.pt2mx\.(\w+)", "".join(codes))
    (graph,) = own.graphs
    got, want = Counter(graph), Counter(map(str, called(lower_to_inductor(converted))))
    # the number of rows is known here, and few
    assert want - got == {"aten.slice.Tensor": 2, "pt2mx.rotated_fake_quantize_mx.default": 3}
    left = {"pt2mx.dequantize_mx.default": 1, "pt2mx.fake_quantize_mx.default": 3, "aten.matmul.default": 1}
    assert got - want == left


@pytest.mark.compiled
def test_dynamic_shapes(converted):
    own = Recording()
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(converted, dynamic=True, options={"pre_grad_custom_pass": own})
        for batch in (2, 5):
            ids = torch.randint(20, (batch, 4))
            torch.testing.assert_close(run(ids), converted(ids), rtol=1e-3, atol=1e-3)
    assert [graph.count("pt2mx.linear_mx.default") for graph in own.graphs] == [3]
    # which operator quantizes depends on the machine's instructions
    assert [sum("fake_quantize_mx" in target for target in graph) for graph in own.graphs] == [3]


@pytest.mark.compiled
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: torch.relu_(x),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: operator.imul(x, 2),
    ],
)
def test_a_graph_that_writes_by_other_means_stays(write):
    def run(x):
        scale, data = pt2mx.quantize_mx(x, "mxfp8")
        x = x.clone()
        write(x)
        return pt2mx.dequantize_mx(data, scale, "mxfp8"), x

    own, x = Recording(), torch.randn(4, 64)
    got, _ = compiled(run, own, (x,))
    assert all(torch.equal(a, b) for a, b in zip(got, run(x), strict=True))
    assert own.graphs and not any("pt2mx.fake_quantize_mx.default" in graph for graph in own.graphs)


def test_identity_is_that_of_the_sources(tmp_path, monkeypatch):
    first = LoweringPass().uuid()
    assert first == LoweringPass().uuid() and len(first) == 64
    (tmp_path / "lower.py").write_text("PASSES = ()")
    monkeypatch.setattr(inductor_pass, "__file__", str(tmp_path / "inductor_pass.py"))
    second = LoweringPass().uuid()
    (tmp_path / "lower.py").write_text("PASSES = None")
    assert len({first, second, LoweringPass().uuid()}) == 3


class Changed(LoweringPass):
    def uuid(self):
        return hashlib.sha256(b"changed").hexdigest()


def test_identity_is_part_of_the_cache_keys():
    x = torch.randn(3, 64)
    model = convert(torch.nn.Linear(64, 32), (x,), "mxfp4_weight_only")

    def caches(own):
        counters.clear()
        compiled(model, own, (x,))
        return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]

    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        assert caches(LoweringPass()) == (0, 1)
        assert caches(LoweringPass()) == (1, 0)
        assert caches(Changed()) == (0, 1)


@pytest.mark.compiled
def test_a_weight_to_transpose_is_dequantized():
    x = torch.randn(3, 64)
    conv1d = module_of(
        lambda self, x: torch.addmm(self.bias, x, self.weight),
        weight=torch.nn.Parameter(torch.randn(64, 32)),
        bias=torch.nn.Parameter(torch.randn(32)),
    )
    model = convert(conv1d, (x,), "mxfp4_weight_only")
    got, codes = compiled(model, LoweringPass(), (x,))
    torch.testing.assert_close(got, model(x))
    assert packed_calls(codes) == 0
    assert packed_calls(run_and_get_code(torch.compile(lower_to_inductor(model)), x)[1]) == 1
