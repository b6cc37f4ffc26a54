import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.algorithms import Rotation
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours
from pt2mx.pt2e.cli.float_speed import float_graph, speed_beside_float
from pt2mx.pt2e.report.speed import ROUNDS
from tests.flow import convert
from tests.models import IDS, Tied, module_of
from tests.subgraph_models import Cond

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).eval()


def operators(model):
    """The operators that a model and its subgraphs call, without checks of inputs."""
    nodes = [node for inner in graph_modules(model) for node in inner.graph.nodes]
    return sorted(str(node.target) for node in nodes if node.op == "call_function" and "assert" not in str(node.target))


@pytest.mark.compiled_except("model0-x0", "model1-x1")
@pytest.mark.parametrize(("model", "x"), [(net(), X), (Tied().eval(), IDS), (Cond().eval(), X)])
def test_the_graph_in_float_has_the_operators_of_the_float_model(model, x):
    float_program = torch.export.export(model, (x,))
    program = torch.export.export(convert(model, (x,), "mxint8"), (x,))
    graph, float_model = float_graph(program), float_program.module()
    assert operators(graph) == operators(float_model) and len(operators(graph)) > 1
    assert torch.nn.functional.cosine_similarity(graph(x), float_model(x), -1).min() > 0.999
    assert any(map(is_ours, program.graph.nodes)), "the program itself stays"


def test_rotations_of_activations_are_left_out():
    quantizer, exported = pt2mx.MXQuantizer.from_recipe("mxfp4"), torch.export.export(net(), (X,)).module()
    prepared = pt2mx.prepare_pt2e(pt2mx.optimize(exported, quantizer, algorithms=(Rotation(),)), quantizer)
    prepared(X)
    program = torch.export.export(pt2mx.convert_pt2e(prepared), (X,))
    assert "hadamard" in program.graph_module.code
    graph = float_graph(program)
    assert not any(map(is_ours, graph.graph.nodes)) and graph(X).shape == (8, 8)


def test_a_program_over_codes_is_not_one_in_float():
    def forward(self, x):
        scales = torch.full((8, 2), 127, dtype=torch.uint8)
        codes = self.codes + x.sign().to(torch.uint8)
        return x * torch.ops.pt2mx.dequantize_mx(codes, scales, "fp8_e4m3", 32, torch.float32, -1)

    model = module_of(forward, codes=nn.Buffer(torch.zeros(8, 64, dtype=torch.uint8)))
    speed = speed_beside_float("own", lambda: None, torch.export.export(model, (X,)), ((X,), {}), CPU)
    assert list(speed.rounds) == ["own"] and set(speed.failures) == {"bfloat16", "float32"}
    assert "the program computes with codes: it calls pt2mx.dequantize_mx" in speed.failures["float32"]


@pytest.mark.compiled
def test_a_portable_program_does_not_tell_what_is_quantized():
    portable = pt2mx.make_portable(torch.export.export(convert(net(), (X,), "mxint8"), (X,)))
    with pytest.raises(pt2mx.MXError, match="a portable program does not tell what is quantized"):
        float_graph(portable)


def test_a_call_without_a_program_is_timed_alone():
    speed = speed_beside_float("own", lambda: None, None, ((), {}), CPU)
    assert list(speed.rounds) == ["own"] and len(speed.rounds["own"]) == ROUNDS and not speed.failures


@pytest.mark.compiled
def test_the_float_programs_are_compiled_for_dynamic_shapes(compiler, monkeypatch):
    seen = []
    compile_package = torch._inductor.aoti_compile_and_package
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, **options: seen.append(program) or compile_package(program, **options),
    )
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    converted = convert(net(), (X,), "mxint8", shapes=shapes)
    program = torch.export.export(converted, (X,), dynamic_shapes=shapes)
    speed = speed_beside_float("own", lambda: None, program, ((X,), {}), CPU)
    assert list(speed.rounds) == ["own", "bfloat16", "float32"] and not speed.failures
    for float_program, dtype in zip(seen, (torch.bfloat16, torch.float32), strict=True):
        assert {tensor.dtype for tensor in float_program.state_dict.values()} == {dtype}
        (x,) = (node for node in float_program.graph.find_nodes(op="placeholder") if node.name == "input")
        assert x.meta["val"].dtype == dtype and isinstance(x.meta["val"].shape[0], torch.SymInt)
