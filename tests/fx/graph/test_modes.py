import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.modes import FLAGS, mode_of

aten = torch.ops.aten
X, W, HX = torch.linspace(-2, 2, 64).reshape(2, 4, 8), torch.ones(4), torch.zeros(1, 4, 8)
PARAMETERS = [torch.ones(8, 8), torch.eye(8), torch.zeros(8), torch.zeros(8)]
GATES = {"lstm": 4, "gru": 3}

QUANTIZER = pt2mx.MXQuantizer().set_global(pt2mx.get_default_mx_quantization_config("mxint8", "mxint8"))

DROPOUTS = "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ native_dropout"
DROPOUTS = f"{DROPOUTS} feature_alpha_dropout feature_alpha_dropout_".split()
NORMS = "batch_norm instance_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"
NORMS = f"{NORMS} _batch_norm_impl_index".split()

#: operators that no CPU runs, gradients, results in tensors of the caller's, and packed sequences: their schemas alone
ELSEWHERE = re.compile(
    r"backward|[._]out$|cudnn|miopen|_mps|mkldnn|triton|quantized|flash|efficient|mem_eff|overrideable|sdp_choice|\.data$"
)


def operators():
    """Yield every operator of aten with an argument that sets a mode, or may do so by its name."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace == "aten" and any(re.search(r"train|dropout_p|input_stats", a.name) for a in schema.arguments):
            yield getattr(getattr(aten, name), schema.overload_name or "default")


def test_every_operator_with_a_mode_is_known():
    named = list(operators())
    assert len(named) > 80
    without = {str(op) for op in named if mode_of(op) is None}
    assert without == {f"aten._native_batch_norm_legit.no_stats{out}" for out in ("", "_out")}
    for op in set(named) - {op for op in named if mode_of(op) is None}:
        mode, argument = mode_of(op), op._schema.arguments[mode_of(op).position]
        assert not argument.kwarg_only and mode.evaluation == FLAGS[argument.name], op


class Call(nn.Module):
    """One operator, of x and buffers."""

    def __init__(self, op, *args):
        super().__init__()
        self.op, self.args = op, args
        for i, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                self.register_buffer(f"b{i}", argument.clone())

    def forward(self, x):
        args = [getattr(self, f"b{i}", argument) for i, argument in enumerate(self.args)]
        results = self.op(x + 0, *args)
        return results[0] if isinstance(results, tuple) else results


def recurrent(name):
    """The weights that the operator takes."""
    gates = GATES.get(name, 1)
    return [p.repeat(gates, *[1] * (p.dim() - 1)) for p in PARAMETERS] * 2


class Recurrent(nn.Module):
    def __init__(self, op, name):
        super().__init__()
        self.op, self.is_lstm = op, name == "lstm"
        self.register_buffer("state", HX.repeat(2, 1, 1))
        self.weights = nn.ParameterList(recurrent(name))

    def forward(self, x):
        state = [self.state, self.state] if self.is_lstm else self.state
        return self.op(x, state, list(self.weights), True, 2, 0.5, True, False, False)[0]


def examples():
    """Return name -> a module that calls the operator in training."""
    modules = {name: Call(getattr(aten, name).default, 0.5, True) for name in DROPOUTS}
    modules |= {name: Call(getattr(aten, name).default, 0.1, 0.9, True) for name in ("rrelu", "rrelu_")}
    noisy = ("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
    modules |= {name: Call(getattr(aten, name).default, torch.ones_like(X), 0.1, 0.9, True) for name in noisy}
    for name in NORMS:
        flags = [True] * (len(getattr(aten, name).default._schema.arguments) - 8)
        modules[name] = Call(getattr(aten, name).default, W, W, W / 2, W / 3, True, 0.1, 1e-5, *flags)
    for name in ("scaled_dot_product_attention", "_scaled_dot_product_attention_math"):
        modules[name] = Call(getattr(aten, name).default, X, X, None, 0.5)
    return modules | {
        f"{n}.input": Recurrent(getattr(aten, n).input, n) for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    }


def test_every_operator_of_this_machine_has_an_example():
    names = {str(op).removeprefix("aten.").removesuffix(".default") for op in operators() if mode_of(op)}
    assert {name for name in names if not ELSEWHERE.search(name)} == set(examples())


def exported(name):
    module = examples()[name]
    graph = torch.export.export(module, (X,)).module()
    assert any(mode_of(node.target) for node in graph.graph.nodes), name
    return graph


def written_by(model):
    """Return the state of a model, and the names of the tensors that a call changed."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(X)
    return {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}


@pytest.mark.compiled_cases("*_", "feature_*", "rrelu_with*", "_batch_norm*", "_native*", "gru.input", "rnn_relu.input")
@pytest.mark.parametrize("name", examples())
def test_conversion_evaluates(name):
    """Prepared either way, a graph with the operator in training evaluates and writes nothing once it is converted."""
    torch.manual_seed(0)
    for prepare in (pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e):
        graph, calibrates = exported(name), prepare is pt2mx.prepare_pt2e
        with (
            pytest.warns(UserWarning, match="the exported model runs .* in training mode")
            if calibrates
            else nullcontext()
        ):
            prepared = prepare(graph, QUANTIZER)
        assert prepared.training != calibrates
        pt2mx.enable_fake_quant(prepared)
        converted = pt2mx.convert_pt2e(prepared)
        with torch.no_grad():
            assert not written_by(converted)
            assert torch.equal(converted(X), converted(X))
            assert torch.equal(converted(X), prepared.eval()(X))


@pytest.mark.parametrize("name", examples())
def test_the_graph_knows_what_training_writes(name):
    torch.manual_seed(0)
    graph = exported(name)
    with torch.no_grad():
        changed = written_by(graph)
    known = {node.target for node in written_nodes(graph.graph) if node.op == "get_attr"}
    assert changed <= known
    (call,) = (node for node in graph.graph.nodes if mode_of(node.target))
    mode = mode_of(call.target)
    call.args = (*call.args[: mode.position], mode.evaluation, *call.args[mode.position + 1 :])
    graph.recompile()
    with torch.no_grad():
        assert not written_by(graph)
    assert not [node for node in written_nodes(graph.graph) if node.op == "get_attr" and mode.written]
