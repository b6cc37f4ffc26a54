import pytest
import torch
from torch import nn
from torch.export import Dim

from pt2mx.pt2e.program.program import load_program, save_program
from pt2mx.pt2e.program.sizes import (
    condition_variables,
    dim_names,
    dynamic_shapes,
    guards,
    guards_follow,
    input_nodes,
    parameter_names,
    ranges,
    relations,
)

A = Dim.AUTO
N = Dim("n", min=2, max=50)


class Pass(nn.Module):
    def forward(self, *xs):
        return [x + 1 for x in xs]


class Add(nn.Module):
    def forward(self, *xs):
        return sum(xs)


class Even(nn.Module):
    def forward(self, x):
        return x * (2 if x.shape[0] % 2 == 0 else 3)


class Pairs(nn.Module):
    def forward(self, x):
        return x.reshape(-1, 2, 3)


class Cat(nn.Module):
    def forward(self, x, y, z):
        return torch.cat([x, y]) + z


#: model, lengths of its inputs, dynamic shapes, whether the guards follow from the shapes, lengths that the model
#: takes, and lengths that it refuses
CASES = {
    "free": (Pass(), (4, 5), (A, A), True, [(3, 9), (7, 2)], []),
    "equal": (Add(), (4, 4), (N, N), True, [(3, 3), (50, 50)], [(3, 4)]),
    "equal, found by tracing": (Add(), (4, 4), (A, A), True, [(3, 3)], [(3, 4), (4, 5)]),
    "derived": (Pass(), (4, 11), (N, 2 * N + 3), True, [(5, 13)], [(5, 14), (6, 13)]),
    "derived alone": (Pass(), (11,), (2 * N + 3,), True, [(13,), (7,)], [(8,), (12,)]),
    "even": (Even(), (4,), (A,), False, [(6,), (2,)], [(3,), (5,)]),
    "pairs": (Pairs(), (8,), (A,), False, [(6,), (12,)], [(7,), (9,)]),
    "a sum": (Cat(), (4, 5, 9), (A, A, A), True, [(2, 3, 5), (7, 2, 9)], [(2, 3, 6), (4, 4, 9)]),
    "a static one": (Pass(), (4, 5), (None, A), True, [(4, 7)], []),
}


def exported(name):
    model, lengths, dims, *_ = CASES[name]
    shapes = tuple(None if dim is None else {0: dim} for dim in dims)
    shapes = shapes if isinstance(model, Even | Pairs | Cat) else {"xs": shapes}
    args = tuple(torch.randn(n, 3) for n in lengths)
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    return program, program.module(), args


def hold(program, module, lengths):
    """Return whether the conditions are true, as a package evaluates them."""
    args = tuple(torch.randn(n, 3) for n in lengths)
    variables = condition_variables(list(args), parameter_names(module, len(args)), args, {})
    return all(eval(condition, {"L": variables}) for condition in [*relations(program), *guards(program)])


@pytest.mark.parametrize("name", CASES)
def test_conditions_are_those_of_the_program(name):
    program, module, args = exported(name)
    *_, follow, taken, refused = CASES[name]
    assert guards_follow(program, module) == follow
    for lengths in [tuple(map(len, args)), *taken]:
        module(*(torch.randn(n, 3) for n in lengths))
        assert hold(program, module, lengths)
    for lengths in refused:
        assert not hold(program, module, lengths)
        if name != "derived alone":  # torch checks it of two inputs only
            with pytest.raises(AssertionError):
                module(*(torch.randn(n, 3) for n in lengths))


@pytest.mark.compiled_cases("equal, found by tracing", "derived", "free", "a sum")
@pytest.mark.parametrize("name", CASES)
def test_exported_again_the_conditions_are_the_same(name):
    program, module, args = exported(name)
    *_, taken, refused = CASES[name]
    again = torch.export.export(module, args, dynamic_shapes=dynamic_shapes(program, module))
    assert [[high for _, high in r] for r in ranges(again)] == [[high for _, high in r] for r in ranges(program)]
    for lengths in taken:
        assert hold(again, again.module(), lengths)
    for lengths in refused:
        assert not hold(again, again.module(), lengths)


class Net(nn.Module):
    def forward(self, x, pair, k=None, flag=True):
        y = x @ pair["a"].t() + k[:, :1]
        return y if flag else y + pair["b"]


@pytest.fixture
def program():
    batch = Dim("batch", min=2, max=99)
    pair = {"a": torch.randn(11, 8), "b": torch.randn(3)}
    shapes = {"x": {0: batch}, "pair": {"a": {0: 2 * batch + 3}, "b": None}, "k": {0: batch, 1: Dim("width")}}
    kwargs = {"k": torch.randn(4, 12), "flag": True}
    return torch.export.export(
        Net(), (torch.randn(4, 8), pair), kwargs, dynamic_shapes={**shapes, "flag": None}, strict=False
    )


def test_exported_again_a_program_takes_the_same_shapes(program):
    """One dimension in two inputs, a linear function of it, one without a bound; trees, keywords and a constant."""
    module = program.module()
    shapes = dynamic_shapes(program, module)
    again = torch.export.export(module, *program.example_inputs, dynamic_shapes=shapes)
    assert ranges(again) == ranges(program)
    x, a, b, k, flag = (node.meta["val"] for node in input_nodes(again))
    assert flag is True and b.shape == (3,)
    assert x.shape[0] == k.shape[0] and a.shape[0] == 2 * x.shape[0] + 3 and k.shape[1] != x.shape[0]
    with pytest.raises(AssertionError):
        again.module()(
            torch.randn(4, 8), {"a": torch.randn(12, 8), "b": torch.randn(3)}, k=torch.randn(4, 1), flag=True
        )


def test_dimensions_keep_their_names(program, tmp_path):
    save_program(program, tmp_path / "net.pt2")
    for one in (program, load_program(tmp_path / "net.pt2")):
        x, _, k, _ = dynamic_shapes(one, one.module())
        assert (x[0].__name__, k[1].__name__) == ("batch", "width")
        assert set(dim_names(one).values()) == {"batch", "width"}


DIMS = {0: Dim("batch"), 1: Dim("sequence")}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shapes", [(DIMS, {0: A, 1: A}), ({0: A, 1: Dim.DYNAMIC}, DIMS)], ids=["first", "second"])
def test_names_of_dimensions_that_equal_others_without_a_name(shapes, strict, tmp_path):
    program = torch.export.export(
        Add(), (torch.randn(3, 5), torch.randn(3, 5)), dynamic_shapes={"xs": shapes}, strict=strict
    )
    save_program(program, tmp_path / "net.pt2")
    for one in (program, load_program(tmp_path / "net.pt2")):
        names = dim_names(one)
        assert [[names.get(str(size)) for size in node.meta["val"].shape] for node in input_nodes(one)] == [
            ["batch", "sequence"],
            ["batch", "sequence"],
        ]


@pytest.mark.parametrize("record", ["abc", 5, None, ["s17"], {"s17": 5}, {"s17": "2*batch"}, {"s17": None}])
def test_a_damaged_record_of_names_gives_none(record):
    program = torch.export.export(Add(), (torch.randn(3),), dynamic_shapes={"xs": ({0: A},)})
    program.graph_module.meta["custom"] = {"pt2mx.dims": record}
    assert dim_names(program) == {}


def test_ranges(program):
    assert ranges(program) == [[(2, 99), (8, 8)], [(7, 201), (8, 8)], [(3, 3)], [(2, 99), (0, None)], None]


def test_static_shapes():
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),))
    assert dynamic_shapes(program, program.module()) == ({},) and ranges(program) == [[(3, 3), (4, 4)]]


@pytest.mark.compiled
def test_minilm(minilm):
    module = minilm.program.module()
    again = torch.export.export(module, minilm.args, dynamic_shapes=dynamic_shapes(minilm.program, module))
    assert ranges(again) == ranges(minilm.program) and [high for _, high in ranges(again)[0]] == [None, 512]
    tokens, mask = (node.meta["val"] for node in input_nodes(again))
    assert tokens.shape == mask.shape and isinstance(tokens.shape[0], torch.SymInt)
