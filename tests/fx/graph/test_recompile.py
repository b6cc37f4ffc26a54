import pytest
import torch
from torch.fx import graph_module

from pt2mx import convert_pt2e, prepare_pt2e
from pt2mx.fx.graph.recompile import generate_code
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.program.build_program import program_of
from tests.subgraph_models import QUANTIZER, Base, Cond

X = torch.randn(4, 64)


class Plain(Base):
    def apply_inner(self, x):
        return torch.relu(self.inner(x))


@pytest.fixture
def generated(monkeypatch):
    """The code of operators that is generated after this."""
    sources = []
    of_source = graph_module._forward_from_src

    def recorded(source, *args):
        if "torch.ops" in source:
            sources.append(source)
        return of_source(source, *args)

    monkeypatch.setattr(graph_module, "_forward_from_src", recorded)
    return sources


@pytest.mark.parametrize("model", [Plain(), Cond()])
def test_a_copy_gets_code_at_the_end(model, generated):
    exported = torch.export.export(model, (X,)).module()
    code = exported.code
    generated.clear()
    copied = copy_sharing_tensors(exported, delays_code=True)
    copied.recompile()
    assert generated == []
    assert generate_code(copied) is copied
    assert len(generated) == (1 if isinstance(model, Plain) else 5)  # torch.fx generates that of subgraphs twice
    assert copied.code == exported.code == code
    assert torch.equal(copied(X), exported(X))


def test_a_graph_without_tensors_is_copied():
    exported = torch.export.export(torch.nn.ReLU(), (X,)).module()
    copied = generate_code(copy_sharing_tensors(exported, delays_code=True))
    assert copied.code == exported.code and torch.equal(copied(X), X.relu())


def test_the_flow_generates_code_once_a_graph(generated):
    program = torch.export.export(Plain(), (X,))
    exported = program.module()
    generated.clear()
    prepared = prepare_pt2e(exported, QUANTIZER)
    assert generated == [prepared.code]
    prepared(X)
    converted = convert_pt2e(prepared)
    assert generated == [prepared.code, converted.code]
    assert torch.equal(program_of(converted, program).module()(X), converted(X))


def test_changes_of_torch_cost_time_alone(monkeypatch, generated):
    """A torch that generates code in another way does so after each change."""
    monkeypatch.delattr("pt2mx.fx.graph.recompile._NoCode._gen_python_code")
    exported = torch.export.export(Plain(), (X,)).module()
    generated.clear()
    prepared = prepare_pt2e(exported, QUANTIZER)
    assert len(generated) > 1 and generated[-1] == prepared.code
