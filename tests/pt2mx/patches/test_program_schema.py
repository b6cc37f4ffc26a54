import typing

import pytest
import sympy
import torch
from torch import nn
from torch._export.serde import schema, serialize
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import Dim

import pt2mx
from pt2mx.fx.graph.aliasing import storage_of
from pt2mx.patches.program_schema import _Reader, schema_read_once
from tests.models import module_of


class Branch(nn.Module):
    """Sizes of its own, of a sum of two and of a product, in a subgraph too, and one without a hint."""

    def forward(self, x, y):
        both = torch.cat([x, y])
        indices = x.sum(1).nonzero()
        chosen = torch.cond(both.sum() > 0, lambda both: both * 2, lambda both: both - 1, (both,))
        return chosen.repeat(2, 1), indices


@pytest.fixture
def path(tmp_path):
    inputs = torch.randn(4, 3), torch.randn(5, 3)
    shapes = {0: Dim("rows", max=64)}, {0: Dim("others", max=64)}
    program = torch.export.export(Branch(), inputs, dynamic_shapes=shapes)
    pt2mx.save_program(program, tmp_path / "branch.pt2")
    return tmp_path / "branch.pt2"


def deserialize(path):
    with schema_read_once():
        return torch.export.load(path)


def described(program):
    graphs = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    metas = [str(node.meta.get("val")) for graph in graphs for node in graph.graph.nodes]
    return str(program), metas, str(program.range_constraints), str(program.graph_signature)


def test_the_program_is_that_of_torch(path):
    program, want = deserialize(path), torch.export.load(path)
    assert described(program) == described(want)
    assert program.example_inputs[0][0].equal(want.example_inputs[0][0])
    inputs = torch.randn(7, 3), torch.randn(2, 3)
    assert all(map(torch.equal, program.module()(*inputs), want.module()(*inputs)))


def test_each_type_and_size_is_read_once(path, monkeypatch):
    types, sizes = [], []
    resolve, parse = typing.get_type_hints, sympy.sympify
    monkeypatch.setattr(typing, "get_type_hints", lambda cls, **names: (types.append(cls), resolve(cls, **names))[1])
    monkeypatch.setattr(sympy, "sympify", lambda text, **names: (sizes.append(text), parse(text, **names))[1])
    torch.export.load(path)
    assert len(types) > 5 * len(set(types))
    types.clear(), sizes.clear()
    deserialize(path)
    payloads = [kind for kind in types if kind is schema.PayloadConfig]  # torch asks for weights, and for constants
    assert len(types) - len(payloads) + 1 == len(set(types)) > 10
    texts = [text for text in sizes if isinstance(text, str)]
    assert len(texts) <= 2 * len(set(texts)) > 4  # some have a hint at one place and none at another


def test_torch_is_as_before_also_after_an_error(path, tmp_path):
    deserializer = serialize.GraphModuleDeserializer
    names = "_parse_sym_expr", "deserialize_tensor_meta"
    before = serialize._dict_to_dataclass, *(getattr(deserializer, name) for name in names)
    deserialize(path)
    with pytest.raises(Exception, match=r"nothing\.pt2"):
        deserialize(tmp_path / "nothing.pt2")
    assert before == (serialize._dict_to_dataclass, *(getattr(deserializer, name) for name in names))


def test_inputs_have_memory_of_their_own(tmp_path):
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y, x * y

    x = torch.ones(2, 3)
    pt2mx.save_program(torch.export.export(Add(), (x, x.clone())), tmp_path / "add.pt2")
    graph = deserialize(tmp_path / "add.pt2").graph
    inputs, results = [], []
    for node in graph.nodes:
        if node.op != "output":
            (inputs if node.op == "placeholder" else results).append(node.meta["val"])
    assert results[0] is not results[1] and storage_of(results[0]) == storage_of(results[1])
    assert len({*map(storage_of, [*inputs, results[0]])}) == 3


def test_fake_example_inputs_have_memory_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(serialize.log, "warning", lambda *args, **names: None)  # its format lacks an argument
    with FakeTensorMode():
        inputs = torch.ones(2, 4), torch.ones(2, 4)
        program = torch.export.export(module_of(lambda self, x, y: x + y), inputs)
    torch.export.save(program, tmp_path / "fake.pt2")
    loaded = deserialize(tmp_path / "fake.pt2")
    assert described(loaded) == described(torch.export.load(tmp_path / "fake.pt2"))
    x, y = loaded.example_inputs[0]
    assert isinstance(x, FakeTensor) and storage_of(x) != storage_of(y)


@pytest.mark.parametrize("device", [None, {"type": "cpu", "index": None, "of a newer torch": 1}])
def test_json_is_read_as_torch_reads_it(device):
    device_of_meta = device or {"type": "cuda", "index": 1}
    meta = {"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": False, "device": device_of_meta}
    meta |= {"strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}
    payload = {"path_name": "weight", "is_param": True, "use_pickle": False, "tensor_meta": device and meta}
    numbers = dict[str, list[float]], {"a": [1, "inf"], "b": []}
    for kind, data in ((schema.PayloadMeta, payload), (schema.TensorMeta, meta), numbers):
        assert _Reader(None)(kind, data) == serialize._dict_to_dataclass(kind, data)
