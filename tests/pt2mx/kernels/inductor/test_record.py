"""A recorded program gives the bits of the program, without its Python code."""

import threading
from collections.abc import Callable
from types import FunctionType, MethodType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor.output_code import CompiledFxGraph

from pt2mx import ops
from pt2mx.kernels.inductor.record import RecordedProgram, _is_generated, _Recorder, record
from pt2mx.ops.linear import linear_mx

WEIGHT = tuple(
    reversed(ops.quantize_mx(torch.linspace(-4, 4, 64 * 64).view(64, 64), "fp4_e2m1", 32, -1, "floor", "even"))
)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def compiled(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, **options)


def layer(x: Tensor) -> Tensor:
    return linear_mx(x, *WEIGHT, None, "fp4_e2m1", 32, 0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, table, at: layer(layer(x).relu()) + table[at],
        lambda x, table, at: layer(x).sort(dim=-1).values @ table,  # operators of torch
        lambda x, table, at: torch.cat([layer(x), table.cumsum(0)[at]]).softmax(-1),
    ],
)
@pytest.mark.compiled_except("<lambda>0-True", "<lambda>1-False", "<lambda>2-False")
def test_bits_of_the_program(function, dynamic):
    x, table, at = torch.randn(2, 64), torch.randn(64, 64), torch.tensor([3, 5])
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(at, 0)
    program = compiled(function)
    result, replay = record(lambda: program(x, table, at))
    for seed in range(3):
        assert replay() and torch.equal(result, program(x, table, at))
        x.normal_()
        at.random_(0, 64)
        table += seed


def test_a_program_that_writes_its_input():
    def step(x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x[None])
        return cache.sum(0) * 2

    x, cache, at, program = torch.ones(8), torch.zeros(4, 8), torch.tensor([0]), compiled(step)
    result, replay = record(lambda: program(x, cache, at))
    at += 2
    x += 1
    assert replay() and cache[:, 0].tolist() == [1.0, 0.0, 2.0, 0.0] and result.tolist() == [6.0] * 8


def test_an_index_that_does_not_exist():
    """The replay stops, and the program says what is wrong."""
    table, at, program = torch.randn(4, 8), torch.tensor([1]), compiled(lambda table, at: table[at] * 2)
    _, replay = record(lambda: program(table, at))
    at.fill_(4)
    assert not replay()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        program(table, at)


def reads_a_value(x: Tensor) -> Tensor:
    n = (x < 9).sum().item()
    torch._check(n >= 0)
    return torch.arange(n) * 2


def has_a_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def has_a_loop(x: Tensor) -> Tensor:
    return while_loop(lambda x: x.sum() < 99, lambda x: (x.abs() + 1,), (x,))[0] + 0


def in_two_graphs(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (reads_a_value, {}),
        (has_a_condition, {}),
        (has_a_loop, {}),
        (in_two_graphs, {}),
        (lambda x: x * 2, {"backend": "eager"}),
        (lambda x: x, {}),
        (lambda x: x.view(2, -1), {}),
    ],
)
def test_programs_that_are_not_recorded(function, options):
    x, program = torch.randn(2, 8), compiled(function, **options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        result, replay = record(lambda: program(x))
    assert replay is None and torch.equal(result, function(x))


def test_code_that_is_not_straight():
    class Runner:
        def call(self, args):
            (x,) = args
            args.clear()
            while x:
                x = torch.neg(x)
            return (x,)

    def straight(self, args):
        (x,) = args
        args.clear()
        return (torch.neg(x),)

    assert not _is_generated(Runner().call)
    straight.__name__ = "call"
    assert _is_generated(MethodType(straight, Runner()))


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [NameError, AttributeError])
def test_a_fault_of_an_operator_is_raised(kind):
    runs = []

    @torch.library.custom_op(f"pt2mx_record::{kind.__name__}", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 1:
            raise kind("of an operator")
        return x.clone()

    operator.register_fake(torch.empty_like)
    x, program = torch.randn(2, 8), compiled(lambda x: operator(x) * 2)
    with pytest.raises(kind, match="of an operator"):
        record(lambda: program(x))
    assert len(runs) == 1


def other_name(self, args):
    (x,) = args
    args.clear()
    return (other_names(x),)  # noqa: F821


def other_attribute(self, args):
    (x,) = args
    args.clear()
    return (torch.neg(x),)


def known_names(self, args):
    (x,) = args
    args.clear()
    return (torch.ops.aten.mul.Tensor(x, max(2, 3)),)  # a name of Python


@pytest.mark.parametrize("code", [other_name, other_attribute, known_names])
def test_names_of_generated_code(code):
    call = FunctionType(code.__code__, code.__globals__, "call")
    graph, x, recorder = SimpleNamespace(current_callable=MethodType(call, object())), torch.randn(4), _Recorder()
    (result,) = recorder.run(graph, [x], lambda: [None])
    if code is known_names:
        assert torch.equal(result, x * 3) and recorder.replay_of(result) is not None
    else:
        assert result is None and recorder.replay_of(x) is None


def test_a_program_is_recorded_until_it_replays():
    x, program, runs = torch.randn(2, 64), compiled(layer, dynamic=False), []

    def run() -> Tensor:
        runs.append(1)
        return program(x)

    recorded, now = RecordedProgram(run), torch.get_num_threads()
    assert not recorded.is_recorded
    try:
        for threads in (now, now, now + 1, now + 1, now):
            torch.set_num_threads(threads)
            x.normal_()
            assert torch.equal(recorded(), layer(x)) and recorded.is_recorded
    finally:
        torch.set_num_threads(now)
    assert len(runs) == 3
    other = RecordedProgram(lambda: runs.append(1) or layer(x))
    assert torch.equal(other(), other()) and not other.is_recorded and len(runs) == 5


@pytest.mark.compiled
def test_a_weight_in_other_memory():
    x, weight = torch.randn(8, 64), torch.nn.Parameter(torch.randn(64))
    program = compiled(lambda x: x * weight + 1)
    recorded = RecordedProgram(lambda: program(x))
    for data in (weight.data, weight.data, torch.randn(64), torch.ones(64)):
        weight.data = data
        for _ in range(2):
            assert torch.equal(recorded(), x * weight + 1) and recorded.is_recorded
            weight += 1


@pytest.mark.compiled
def test_the_memory_of_inference_mode():
    """Operators may write to it only in that mode."""
    x, table = torch.randn(2, 64), torch.randn(64, 64)
    program = compiled(lambda x: (layer(x) @ table).relu())
    recorded = RecordedProgram(lambda: program(x))
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(recorded(), (layer(x) @ table).relu()) and recorded.is_recorded


@pytest.mark.compiled
def test_autocast():
    x, table = torch.randn(2, 64), torch.randn(64, 64)
    program = compiled(lambda x: x @ table)
    recorded = RecordedProgram(lambda: program(x))
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            assert recorded().dtype == (torch.bfloat16 if enabled else torch.float32)


@pytest.mark.compiled
def test_threads_record_at_the_same_time():
    original, results = CompiledFxGraph.__call__, {}
    programs = [torch.compile(lambda x, i=i: layer(x) * i, dynamic=False) for i in range(2)]
    x = torch.randn(1, 64)

    def run(i: int) -> None:
        with torch.no_grad():
            results[i] = record(lambda: programs[i](x))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CompiledFxGraph.__call__ is original
    x.normal_()
    for i, (result, replay) in results.items():
        assert replay() and torch.equal(result, layer(x) * i)
