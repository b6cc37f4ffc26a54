import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx
from pt2mx.pt2e.quantizer.operators import operator_name
from tests.quantized_by_hand import BOTH, A, W, a, w


def normal(module):
    """Values of many magnitudes, because torch's uniform ones have the same scale along every axis."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.eval()


def rnn(operator, kind, *shape, inputs=((7, 2, 40),), **options):
    return pytest.param(operator, kind, shape, options, inputs, id=" ".join([operator, *map(str, options.values())]))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # export's, of every recurrent module
@pytest.mark.parametrize(
    ("operator", "kind", "shape", "options", "input_shapes"),
    [
        rnn("lstm.input", nn.LSTM, 40, 20, num_layers=2, bidirectional=True, proj_size=18),
        rnn("lstm.input", nn.LSTM, 40, 20, bias=False, batch_first=True, bidirectional=False),
        rnn("gru.input", nn.GRU, 40, 20, num_layers=2, dropout=0.5),
        rnn("rnn_tanh.input", nn.RNN, 40, 20, nonlinearity="tanh"),
        rnn("rnn_relu.input", nn.RNN, 40, 20, nonlinearity="relu"),
        rnn("gru_cell", nn.GRUCell, 40, 20, inputs=((2, 40), (2, 20))),
        rnn("rnn_tanh_cell", nn.RNNCell, 40, 20, nonlinearity="tanh", inputs=((2, 40), (2, 20))),
        rnn("rnn_relu_cell", nn.RNNCell, 40, 20, nonlinearity="relu", inputs=((2, 40), (2, 20))),
    ],
)
def test_recurrent_layers(operator, kind, shape, options, input_shapes, quantize):
    """Weights and input have blocks along their last dimension, and so has a cell's hidden state if only a matmul uses
    it."""
    torch.manual_seed(1)
    model, inputs = normal(kind(*shape, **options)), tuple(torch.randn(s) for s in input_shapes)
    exported = torch.export.export(model, inputs)
    assert f"aten.{operator}" in {operator_name(node.target) for node in exported.graph.nodes}
    bias = MXQuantizationConfig(activation=A, weight=W, bias="mxint8")
    prepared, _, converted = quantize(exported, MXQuantizer().set_global(bias), inputs)
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            parameter.copy_(w(parameter, -1) if "weight" in name else fake_quantize_mx(parameter, "mxint8"))
        x, *hidden = inputs
        if kind is nn.RNNCell:
            hidden = [a(h, -1) for h in hidden]
        want, got = by_hand(a(x, -1), *hidden), converted(*inputs)
    for expected, prepared_value, value in zip(
        *map(torch.utils._pytree.tree_leaves, (want, prepared, got)), strict=True
    ):
        assert torch.equal(value, expected) and torch.equal(value, prepared_value)
    assert not any(t.is_floating_point() for t in converted.state_dict().values())
    (report,) = pt2mx.quantization_report(converted).operators
    assert {o.role for o in report.operands} == {"activation", "weight"} | ({"bias"} if model.bias else set())
    assert all(o.spec for o in report.operands)


def test_an_lstm_cell_quantizes_its_hidden_but_not_its_cell_state(quantize):
    model, state = normal(nn.LSTMCell(40, 20)), (torch.randn(2, 20), torch.randn(2, 20))
    inputs = (torch.randn(2, 40), state)
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    weights = [w(model.weight_ih, -1), w(model.weight_hh, -1), model.bias_ih, model.bias_hh]
    with torch.no_grad():
        want = torch.lstm_cell(a(inputs[0], -1), (a(state[0], -1), state[1]), *weights)
        assert all(torch.equal(g, e) for g, e in zip(converted(*inputs), want, strict=True))
        assert all(torch.equal(g, e) for g, e in zip(prepared, want, strict=True))


def test_a_cell_with_one_tensor_as_both_states(quantize):
    """A zero initial state of an LSTM cell is the same node twice."""
    model, inputs = nn.LSTMCell(40, 20).eval(), (torch.randn(2, 40),)
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert all(torch.equal(g, e) for g, e in zip(converted(*inputs), prepared, strict=True))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")
def test_a_recurrent_layer_of_any_batch_and_length(quantize):
    model, inputs = nn.LSTM(40, 20, batch_first=True).eval(), (torch.randn(3, 5, 40),)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim.AUTO},)
    _, prepared, converted = quantize(torch.export.export(model, inputs, dynamic_shapes=shapes), BOTH, inputs)
    for shape in ((3, 5, 40), (1, 5, 40), (4, 5, 40)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert torch.equal(converted(x)[0], prepared(x)[0])
