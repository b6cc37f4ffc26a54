import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.graph import CodeGen

from pt2mx.fx.graph import recompile
from pt2mx.fx.graph.recompile import module_of, recompile_once


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y


class Negated(nn.Module):
    def forward(self, x):
        return -x


@pytest.fixture
def model():
    return symbolic_trace(Negated())


@pytest.fixture
def compiled(model, monkeypatch):
    """The modules whose code is generated after the code of `model`."""
    modules = []
    generate = recompile._generate
    monkeypatch.setattr(recompile, "_generate", lambda module: (modules.append(module), generate(module))[1])
    return modules


def change(model: GraphModule) -> None:
    """Make the result of a graph its input."""
    (x,) = model.graph.find_nodes(op="placeholder")
    model.graph.output_node().args = (x,)
    model.recompile()


def test_a_result_gets_code_once(model, compiled):
    x = torch.ones(2)
    with recompile_once() as mark:
        result = mark(GraphModule(model, model.graph))
        for _ in range(3):
            change(result)
        assert compiled == []
    assert compiled == [result] and torch.equal(result(x), x)


def test_older_modules_get_code_and_copies_in_between_do_not(model, compiled):
    x = torch.ones(2)
    with recompile_once():
        other = GraphModule(model, model.graph)
        change(model)
    assert compiled == [model] and torch.equal(model(x), x) and torch.equal(other(x), x)


def test_a_module_that_is_called_gets_code(model):
    x = torch.ones(2)
    with recompile_once():
        change(model)
        assert torch.equal(model(x), x)


@pytest.mark.parametrize("read", [lambda m: "return x" in m.code, lambda m: "return x" in str(m)])
@pytest.mark.parametrize("after", [False, True])
def test_code_that_is_read_is_generated(model, read, after):
    """Of a copy, in the context and afterwards, and of an older module, whose code is not that of its former graph."""
    with recompile_once():
        other = GraphModule(model, model.graph)
        change(other)
        change(model)
        assert after or (read(other) and read(model))
    assert read(other) and read(model)


def test_a_delayed_module_exports():
    """`torch.export` reads the structure of the inputs, which `recompile` sets too."""
    x = torch.ones(2)
    with recompile_once():
        exported = torch.export.export(symbolic_trace(Negated()), (x,)).module()
        assert torch.equal(exported(x), -x)


def test_a_forward_that_is_kept_generates_code_once(model, compiled):
    """As Dynamo keeps it."""
    with recompile_once():
        change(model)
        forward = model.forward
    compiled.clear()
    for _ in range(3):
        assert torch.equal(forward(torch.ones(2)), torch.ones(2))
    assert compiled == []


def test_copies_are_freed(model):
    with recompile_once():
        copied = weakref.ref(copy.deepcopy(model))
        gc.collect()
        assert copied() is None


def test_torch_s_method_is_back_after_the_last_context():
    """In whichever thread that ends, and after an error."""
    torch_s, inside, leave = GraphModule.recompile, threading.Event(), threading.Event()

    def other_thread():
        with recompile_once():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other_thread)
    with pytest.raises(ZeroDivisionError), recompile_once():
        with recompile_once():
            thread.start()
            inside.wait()
        assert GraphModule.recompile is not torch_s
        raise ZeroDivisionError
    assert GraphModule.recompile is not torch_s
    leave.set()
    thread.join()
    assert GraphModule.recompile is torch_s


def test_an_error_leaves_no_code_behind(model):
    x = torch.ones(2)
    with pytest.raises(ZeroDivisionError), recompile_once():
        change(model)
        raise ZeroDivisionError
    change(fresh := symbolic_trace(Negated()))
    assert torch.equal(model(x), x) and torch.equal(fresh(x), x)


def test_nested_contexts(compiled):
    with recompile_once() as mark_outer:
        with recompile_once() as mark:
            inner = mark(symbolic_trace(Negated()))
        assert compiled == []
        outer = mark_outer(nn.Sequential(inner))
    assert compiled == [inner] and torch.equal(outer(torch.ones(2)), -torch.ones(2))


def test_other_threads_are_not_delayed(compiled):
    with recompile_once():
        thread = threading.Thread(target=lambda: symbolic_trace(Negated()))
        thread.start()
        thread.join()
        assert len(compiled) == 1


def test_the_signature_of_a_module_generates_its_code(model, compiled):
    with recompile_once():
        change(model)
        assert list(inspect.signature(model.forward).parameters) == ["x"]
        assert compiled == [model]


def test_the_forward_of_the_class_generates_the_code(model, compiled):
    x = torch.ones(2)
    with recompile_once():
        change(model)
        assert list(inspect.signature(type(model).forward).parameters) == ["self", "x"]
        assert compiled == [model] and torch.equal(type(model).forward(model, x), x)


@pytest.mark.parametrize("read", [lambda m: m.forward, lambda m: m.code, lambda m: m(torch.ones(2))])
def test_an_attribute_error_of_the_generation_is_told(model, read):
    """A lookup would replace it by its own: "no attribute 'forward'"."""

    class Broken(CodeGen):
        def gen_fn_def(self, *args, **kwargs):
            raise AttributeError("no 'spam'")

    with recompile_once():
        model.graph.set_codegen(Broken())
        model.recompile()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^cannot generate the code of the graph: no 'spam'$") as caught:
                read(model)
            assert isinstance(caught.value.__cause__, AttributeError)
        model.graph.set_codegen(CodeGen())


@pytest.mark.parametrize("waits", [True, False])
def test_modules_are_pickled_with_their_code(model, waits):
    """In the context, of which the first module has a new graph, and afterwards a copy that nobody used."""
    x = torch.ones(2)
    with recompile_once():
        other = copy.deepcopy(model)
        change(other)
        if waits:
            change(model)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), x if waits else -x)
    assert torch.equal(pickle.loads(pickle.dumps(nn.Sequential(other)))(x), x)
    assert torch.equal(copy.deepcopy(other)(x), x) and torch.equal(model(x), x if waits else -x)


@pytest.mark.parametrize("check_guards", [True, False])
def test_the_module_of_a_program_is_torch_s(check_guards, compiled):
    shapes = ({0: torch.export.Dim("batch")},) * 2
    program = torch.export.export(Sum(), (torch.ones(2, 4), torch.ones(2, 4)), dynamic_shapes=shapes)
    compiled.clear()
    module = module_of(program, check_guards)
    assert compiled.count(module) == len(compiled) or check_guards  # guards are graphs of their own
    assert compiled.count(module) <= 1 + check_guards
    assert module.code == program.module(check_guards).code
    assert torch.equal(module(torch.ones(3, 4), torch.ones(3, 4)), torch.full((3, 4), 2.0))
    with pytest.raises((AssertionError, RuntimeError), match=r"size|shape"):
        module(torch.ones(3, 4), torch.ones(5, 4))
