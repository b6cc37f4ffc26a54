"""Each operator, quantized by the flow, equals itself on operands quantized by hand along its reduction axis."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx, ops
from pt2mx.extras import import_extra
from pt2mx.pt2e.quantizer.operators import OPERANDS, operator_name

W, A = "mxfp6_e2m3{16}", "mxfp8_e4m3{16}"


def w(x, axis):
    return fake_quantize_mx(x, W, axis=axis)


def a(x, axis):
    return fake_quantize_mx(x, A, axis=axis)


class Call(nn.Module):
    """`function(*inputs, *parameters)`."""

    def __init__(self, function, *shapes):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        self.p = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *inputs):
        return self.function(*inputs, *self.p)


def conv(f, spatial, axis=1, **options):
    return (
        lambda x, weight, bias: f(x, weight, bias, **options),
        lambda x, weight, bias: f(a(x, -1 - spatial), w(weight, axis), bias, **options),
    )


def pair(f, first, second):
    """Of two computed tensors."""
    return f, lambda x, y: f(a(x, first), a(y, second))


def added(f):
    """`f(bias, x, weight)`."""
    return lambda x, b, m: f(b, x, m), lambda x, b, m: f(b, a(x, -1), w(m, -2))


def einsum(equation, first, second):
    return pair(lambda x, y: torch.einsum(equation, x, y), first, second)


def decomposed_conv(spatial, transposed):
    def f(x, weight, bias):
        ones = [1] * spatial
        return torch.convolution(x, weight, bias, ones, [0] * spatial, ones, transposed, [0] * spatial, 1)

    return f, lambda x, weight, bias: f(a(x, -1 - spatial), w(weight, 0 if transposed else 1), bias)


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def flash(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def grouped(x, experts):
    return F.grouped_mm(x, experts, offs=torch.tensor([3, 3, 8], dtype=torch.int32))


MASK = torch.ones(5, 7, dtype=torch.bool).tril(2)
QKV = [(2, 2, 5, 20), (2, 2, 7, 20), (2, 2, 7, 20)]
CASES = {
    # operator, and what is special: (function, the same by hand, input shapes, parameter shapes)
    "linear": (F.linear, lambda x, m, b: F.linear(a(x, -1), w(m, -1), b), [(3, 40)], [(8, 40), (8,)]),
    "linear 1-d": (F.linear, lambda x, m: F.linear(a(x, 0), w(m, -1)), [(40,)], [(8, 40)]),
    "linear 3-d": (F.linear, lambda x, m: F.linear(a(x, -1), w(m, -1)), [(2, 3, 40)], [(8, 40)]),
    "linear of a product of parameters": (
        lambda x, m, n: F.linear(x, m * n),
        lambda x, m, n: F.linear(a(x, -1), w(m * n, -1)),
        [(3, 40)],
        [(8, 40), (8, 40)],
    ),
    "bilinear": (
        F.bilinear,
        lambda x, y, m, b: F.bilinear(a(x, -1), a(y, -1), w(m, -1), b),
        [(3, 24), (3, 40)],
        [(8, 24, 40), (8,)],
    ),
    "addmm": (*added(torch.addmm), [(3, 40)], [(8,), (40, 8)]),
    "addbmm": (*added(torch.addbmm), [(2, 3, 40)], [(3, 8), (2, 40, 8)]),
    "baddbmm": (*added(torch.baddbmm), [(2, 3, 40)], [(2, 3, 8), (2, 40, 8)]),
    "addmv": (
        lambda x, b, m: torch.addmv(b, x, m),
        lambda x, b, m: torch.addmv(b, a(x, -1), w(m, 0)),
        [(3, 40)],
        [(3,), (40,)],
    ),
    "mm": (torch.mm, lambda x, m: torch.mm(a(x, -1), w(m, -2)), [(3, 40)], [(40, 8)]),
    "mm computed": (*pair(torch.mm, -1, -2), [(3, 40), (40, 8)], []),
    "matmul weight first": (lambda x, m: m @ x, lambda x, m: w(m, -1) @ a(x, -2), [(40, 8)], [(3, 40)]),
    "bmm": (*pair(torch.bmm, -1, -2), [(2, 3, 40), (2, 40, 8)], []),
    "matmul 4-d": (*pair(torch.matmul, -1, -2), [(2, 2, 3, 40), (2, 2, 40, 8)], []),
    "matmul vector": (*pair(torch.matmul, -1, 0), [(3, 40), (40,)], []),
    "matmul vectors": (*pair(torch.matmul, 0, 0), [(40,), (40,)], []),
    "matmul x @ x": (lambda x: x @ x, lambda x: a(x, -1) @ a(x, -2), [(40, 40)], []),
    "matmul transposed weight": (lambda x, m: x @ m.t(), lambda x, m: a(x, -1) @ w(m.t(), -2), [(3, 40)], [(8, 40)]),
    "linalg_matmul": (*pair(torch.linalg.matmul, -1, -2), [(2, 3, 40), (2, 40, 8)], []),
    "mv": (*pair(torch.mv, -1, 0), [(3, 40), (40,)], []),
    "dot": (*pair(torch.dot, 0, 0), [(40,), (40,)], []),
    "vdot": (*pair(torch.vdot, 0, 0), [(40,), (40,)], []),
    "inner": (*pair(torch.inner, -1, -1), [(2, 3, 40), (5, 40)], []),
    "linalg_vecdot": (*pair(torch.linalg.vecdot, -1, -1), [(3, 40), (3, 40)], []),
    "linalg_vecdot dim": (*pair(lambda x, y: torch.linalg.vecdot(x, y, dim=1), 1, 1), [(3, 40, 20), (3, 40, 20)], []),
    "tensordot": (*pair(lambda x, y: torch.tensordot(x, y, 2), 2, 1), [(3, 20, 40), (20, 40, 8)], []),
    "tensordot dims": (
        *pair(lambda x, y: torch.tensordot(x, y, ([2, 0], [0, 1])), 0, 1),
        [(20, 3, 40), (40, 20, 8)],
        [],
    ),
    "einsum": (*einsum("bij,bjk->bik", -1, -2), [(2, 3, 40), (2, 40, 8)], []),
    "einsum implicit": (*einsum("ij, kj", -1, -1), [(3, 40), (8, 40)], []),
    "einsum first": (*einsum("ki,kj->ij", 0, 0), [(40, 3), (40, 8)], []),
    "einsum two labels": (*einsum("bqhd,hdo->bqo", 3, 1), [(2, 3, 20, 40), (20, 40, 8)], []),
    "einsum ellipsis": (*einsum("...dk,ed...->...ek", -2, 1), [(5, 40, 20), (8, 40, 5)], []),
    "einsum weight": (
        lambda x, m: torch.einsum("bhwc,oc->bohw", x, m),
        lambda x, m: torch.einsum("bhwc,oc->bohw", a(x, -1), w(m, -1)),
        [(2, 3, 3, 40)],
        [(8, 40)],
    ),
    "einsum x, x": (
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.einsum("ij,jk->ik", a(x, 1), a(x, 0)),
        [(40, 40)],
        [],
    ),
    "_grouped_mm": (
        lambda x, m: grouped(x.bfloat16(), m.bfloat16()),
        lambda x, m: grouped(a(x.bfloat16(), -1), w(m.bfloat16(), -2)),
        [(8, 40)],
        [(3, 40, 24)],
    ),
    "conv1d": (*conv(F.conv1d, 1), [(2, 20, 9)], [(6, 20, 3), (6,)]),
    "conv1d unbatched": (*conv(F.conv1d, 1), [(20, 9)], [(6, 20, 3), (6,)]),
    "conv1d.padding": (*conv(F.conv1d, 1, padding="same"), [(2, 20, 9)], [(6, 20, 3), (6,)]),
    "conv2d": (*conv(F.conv2d, 2, stride=2), [(2, 20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv2d.padding": (*conv(F.conv2d, 2, padding="same"), [(2, 20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv2d grouped": (*conv(F.conv2d, 2, groups=2), [(2, 40, 5, 5)], [(6, 20, 3, 3), (6,)]),
    "conv2d depthwise": (*conv(F.conv2d, 2, groups=40), [(2, 40, 5, 5)], [(40, 1, 3, 3), (40,)]),
    "conv2d unbatched": (*conv(F.conv2d, 2), [(20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv3d": (*conv(F.conv3d, 3), [(2, 20, 4, 4, 4)], [(6, 20, 3, 3, 3), (6,)]),
    "conv3d.padding": (*conv(F.conv3d, 3, padding="valid"), [(2, 20, 4, 4, 4)], [(6, 20, 3, 3, 3), (6,)]),
    "conv_transpose1d": (*conv(F.conv_transpose1d, 1, 0), [(2, 40, 9)], [(40, 6, 3), (6,)]),
    "conv_transpose2d.input": (*conv(F.conv_transpose2d, 2, 0, stride=2), [(2, 40, 5, 5)], [(40, 6, 3, 3), (6,)]),
    "conv_transpose2d.input grouped": (
        *conv(F.conv_transpose2d, 2, 0, groups=2, padding=1),
        [(2, 40, 5, 5)],
        [(40, 6, 3, 3), (12,)],
    ),
    "conv_transpose3d.input": (*conv(F.conv_transpose3d, 3, 0), [(2, 40, 4, 4, 4)], [(40, 6, 3, 3, 3), (6,)]),
    "convolution": (*decomposed_conv(2, False), [(2, 40, 5, 5)], [(6, 40, 3, 3), (6,)]),
    "convolution transposed": (*decomposed_conv(1, True), [(2, 40, 5)], [(40, 6, 3), (6,)]),
    "conv_tbc": (
        lambda x, m, b: torch.conv_tbc(x, m, b, 1),
        lambda x, m, b: torch.conv_tbc(a(x, -1), w(m, 1), b, 1),
        [(5, 2, 40)],
        [(3, 40, 6), (6,)],
    ),
    "scaled_dot_product_attention": (
        lambda q, k, v: sdpa(q, k, v, attn_mask=MASK, scale=0.3),
        lambda q, k, v: sdpa(a(q, -1), a(k, -1), a(v, -1), attn_mask=MASK, scale=0.3),
        QKV,
        [],
    ),
    "scaled_dot_product_attention of one tensor": (
        lambda x: sdpa(x, x, x, is_causal=True),
        lambda x: sdpa(a(x, -1), a(x, -1), a(x, -1), is_causal=True),
        [(2, 2, 7, 20)],
        [],
    ),
    "scaled_dot_product_attention of a tensor that is also the mask": (
        lambda q, k, v: sdpa(q, k, v, attn_mask=q),
        lambda q, k, v: sdpa(a(q, -1), a(k, -1), a(v, -1), attn_mask=q),
        [(1, 2, 20, 20)] * 3,
        [],
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        flash,
        lambda q, k, v: flash(a(q, -1), a(k, -1), a(v, -1)),
        QKV,
        [],
    ),
}
#: rows that have tests of their own below
ELSEWHERE = {
    "aten.embedding", "aten.embedding_bag", "aten.embedding_bag.padding_idx", "flex_attention",
    "transformers.grouped_mm_fallback",
    "aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input",
    "aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell",
}  # fmt: skip
BOTH = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))


def test_every_row_has_a_case():
    assert {f"aten.{case.split()[0]}" for case in CASES} | ELSEWHERE == set(OPERANDS)


@pytest.mark.parametrize("case", CASES)
def test_operands_are_quantized_along_the_reduction(case, quantize):
    function, by_hand, input_shapes, parameter_shapes = CASES[case]
    model = Call(function, *parameter_shapes).eval()
    inputs = tuple(torch.randn(shape) for shape in input_shapes)
    exported = torch.export.export(model, inputs)
    assert f"aten.{case.split()[0]}" in {operator_name(node.target) for node in exported.graph.nodes}
    prepared, _, converted = quantize(exported, BOTH, inputs)
    with torch.no_grad():
        assert torch.equal(converted(*inputs), prepared)
        assert torch.equal(converted(*inputs), by_hand(*inputs, *model.p))
    pairs = converted.graph.find_nodes(op="call_function", target=ops.dequantize_mx)
    assert not torch.equal(prepared, model(*inputs)) and len(pairs) >= 2


def normal(module):
    """Values of many magnitudes: torch's uniform ones have the same scale along every axis."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.eval()


def rnn(kind, *shape, inputs=((7, 2, 40),), **options):
    return pytest.param(kind, shape, options, inputs, id=" ".join([kind.__name__, *map(str, options.values())]))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # export's, of every recurrent module
@pytest.mark.parametrize(
    ("kind", "shape", "options", "input_shapes"),
    [
        rnn(nn.LSTM, 40, 20, num_layers=2, bidirectional=True, proj_size=18),
        rnn(nn.LSTM, 40, 20, bias=False, batch_first=True, bidirectional=False),
        rnn(nn.GRU, 40, 20, num_layers=2, dropout=0.5),
        rnn(nn.RNN, 40, 20, nonlinearity="tanh"),
        rnn(nn.RNN, 40, 20, nonlinearity="relu"),
        rnn(nn.GRUCell, 40, 20, inputs=((2, 40), (2, 20))),
        rnn(nn.RNNCell, 40, 20, nonlinearity="tanh", inputs=((2, 40), (2, 20))),
        rnn(nn.RNNCell, 40, 20, nonlinearity="relu", inputs=((2, 40), (2, 20))),
    ],
)
def test_recurrent_layers(kind, shape, options, input_shapes, quantize):
    """Weights and input along their last dimension; a cell's hidden state too, where only a product reads it."""
    torch.manual_seed(1)
    model, inputs = normal(kind(*shape, **options)), tuple(torch.randn(s) for s in input_shapes)
    exported = torch.export.export(model, inputs)
    assert {operator_name(node.target) for node in exported.graph.nodes} & ELSEWHERE
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
    """The state of an LSTM cell that starts at zero is one node twice."""
    model, inputs = nn.LSTMCell(40, 20).eval(), (torch.randn(2, 40),)
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert all(torch.equal(g, e) for g, e in zip(converted(*inputs), prepared, strict=True))


@pytest.mark.parametrize("offsets", [False, True])
def test_embedding_bag_rows(offsets, quantize):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 40, mode="mean", padding_idx=None if offsets else 3)

        def forward(self, ids):
            if offsets:  # the overload without padding
                return torch.ops.aten.embedding_bag(self.bag.weight, ids.reshape(-1), torch.tensor([0, 5]), False, 1)[0]
            return self.bag(ids)

    model, inputs = Bag().eval(), (torch.randint(50, (2, 5)),)
    exported = torch.export.export(model, inputs)
    overload = "aten.embedding_bag" + ("" if offsets else ".padding_idx")
    assert overload in {operator_name(node.target) for node in exported.graph.nodes}
    prepared, _, converted = quantize(exported, MXQuantizer().set_global(MXQuantizationConfig(weight=W)), inputs)
    with torch.no_grad():
        model.bag.weight.copy_(w(model.bag.weight, -1))
        assert torch.equal(converted(*inputs), prepared) and torch.equal(prepared, model(*inputs))
    assert "bag.weight_data" in converted.state_dict() and "bag.weight" not in converted.state_dict()


def test_embedding_rows(quantize):
    model = nn.Sequential(nn.Embedding(50, 40, padding_idx=3)).eval()
    inputs = (torch.randint(50, (2, 5)),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), prepared)
    assert torch.equal(converted(*inputs), F.embedding(inputs[0], w(model[0].weight, -1)))
    assert set(converted.state_dict()) == {"0.weight_data", "0.weight_scale"}


@pytest.mark.parametrize(
    ("function", "by_hand", "input_shape", "parameter_shapes"),
    [
        (F.conv2d, lambda x, m, b: F.conv2d(a(x, 1), w(m, 1), w(b, 0)), (2, 20, 5, 5), [(40, 20, 3, 3), (40,)]),
        (
            F.conv_transpose1d,
            lambda x, m, b: F.conv_transpose1d(a(x, 1), w(m, 0), w(b, 0)),
            (2, 40, 5),
            [(40, 24, 3), (24,)],
        ),
        (
            lambda x, b, m: torch.addmm(b, x, m),
            lambda x, b, m: torch.addmm(w(b, 1), a(x, 1), w(m, 0)),
            (20, 40),
            [(20, 24), (40, 24)],
        ),
        (
            lambda x, b, m: torch.baddbmm(b, x, m),
            lambda x, b, m: torch.baddbmm(w(b, 2), a(x, 2), w(m, 1)),
            (2, 20, 40),
            [(2, 20, 24), (2, 40, 24)],
        ),
        (
            lambda x, m, b: F.bilinear(x, x, m, b),
            lambda x, m, b: F.bilinear(a(x, 1), a(x, 1), w(m, 2), w(b, 0)),
            (2, 20),
            [(24, 20, 20), (24,)],
        ),
    ],
)
def test_biases(function, by_hand, input_shape, parameter_shapes, quantize):
    model, inputs = Call(function, *parameter_shapes).eval(), (torch.randn(input_shape),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W, bias=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    with torch.no_grad():
        assert torch.equal(converted(*inputs), by_hand(*inputs, *model.p))
        assert torch.equal(converted(*inputs), prepared)
    assert {t.dtype for t in converted.state_dict().values()} == {torch.uint8}


def test_bias_and_output(quantize):
    model, inputs = nn.Linear(40, 24).eval(), (torch.randn(3, 40),)
    config = MXQuantizationConfig(activation=A, weight=W, bias=W, output="mxint8")
    prepared, _, converted = quantize(torch.export.export(model, inputs), MXQuantizer().set_global(config), inputs)
    want = F.linear(a(inputs[0], -1), w(model.weight, -1), w(model.bias, -1))
    assert torch.equal(converted(*inputs), fake_quantize_mx(want, "mxint8")) and torch.equal(
        converted(*inputs), prepared
    )


@pytest.mark.parametrize(
    ("equation", "count"),
    [
        ("ij,jk,kl->il", 3),  # three factors
        ("ij->ji", 1),
        ("ij,kl->ijkl", 2),  # an outer product
        ("ij,ij->ij", 2),  # elementwise
        ("ii,ij->j", 2),  # a diagonal
    ],
)
def test_an_einsum_that_is_no_product_is_left_alone(equation, count, quantize):
    model, inputs = Call(lambda *x: torch.einsum(equation, *x)).eval(), (torch.randn(4, 4),) * count
    _, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert torch.equal(converted(*inputs), model(*inputs))
    (report,) = pt2mx.quantization_report(converted).operators
    assert report.reason == "no product of two tensors with a reduced dimension" and not report.operands


def test_elementwise_operators_are_quantized_only_where_they_are_named(quantize):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.randn(40))

        def forward(self, x, y):
            return (x + y) * self.gate + 1.5, x.long() + y.long()

    model, inputs = Residual().eval(), (torch.randn(3, 40), torch.randn(3, 40))
    exported = torch.export.export(model, inputs)
    with torch.no_grad():
        _, _, alone = quantize(exported, BOTH, inputs)
        assert torch.equal(alone(*inputs)[0], model(*inputs)[0])
        assert not pt2mx.quantization_report(alone).operators
        config = MXQuantizationConfig(activation=A, weight=W)
        prepared, _, both = quantize(
            exported, MXQuantizer().set_operator_type("aten.add", config).set_operator_type("aten.mul", config), inputs
        )
        x, y = inputs
        want = a(a(a(x, -1) + a(y, -1), -1) * w(model.gate, -1), -1) + 1.5
        got = both(*inputs)
        assert torch.equal(got[0], want) and torch.equal(got[0], prepared[0])
        assert torch.equal(got[1], x.long() + y.long())
    reports = pt2mx.quantization_report(both).operators
    assert [o.operator for o in reports] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]


def test_experts_that_are_gathered_are_quantized_before(quantize):
    """`weight[ids] @ x`, as transformers' batched experts compute: the parameter is packed, not what was gathered."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(4, 24, 40)), nn.Parameter(torch.randn(4, 24, 40))

        def forward(self, x, ids):
            h = torch.bmm(self.up[ids], x.unsqueeze(-1)).squeeze(-1)
            return torch.bmm(h.unsqueeze(1), self.down[ids])

    model, inputs = Experts().eval(), (torch.randn(6, 40), torch.randint(4, (6,)))
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x, ids = inputs
    with torch.no_grad():
        h = torch.bmm(w(model.up, -1)[ids], a(x.unsqueeze(-1), 1)).squeeze(-1)
        want = torch.bmm(a(h.unsqueeze(1), -1), w(model.down, 1)[ids])
        assert torch.equal(converted(*inputs), want) and torch.equal(prepared, want)
    assert set(converted.state_dict()) == {"up_data", "up_scale", "down_data", "down_scale"}
    roles = [{o.role: o.spec is not None for o in r.operands} for r in pt2mx.quantization_report(converted).operators]
    assert roles == [{"weight": True, "activation": True}] * 2


def test_what_is_gathered_along_the_blocks_or_read_twice_is_quantized_after(quantize):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(40, 8)), nn.Parameter(torch.randn(40, 40))
            self.register_buffer("cache", torch.randn(40, 8))

        def forward(self, x, ids):
            rows = self.b[ids]
            self.cache.add_(1)
            return x @ self.a[ids], x @ rows, rows @ x, torch.bmm(x[None], self.cache[ids][None])

    model, inputs = Rows().eval(), (torch.randn(40, 40), torch.randint(40, (40,)))
    exported = torch.export.export(model, inputs)
    x, ids = inputs
    prepared = pt2mx.prepare_pt2e(exported.module(), BOTH)
    got = pt2mx.convert_pt2e(prepared)(*inputs)
    with torch.no_grad():
        assert torch.equal(got[0], a(x, -1) @ a(model.a[ids], 0))
        assert torch.equal(got[1], a(x, -1) @ a(model.b[ids], 0))
        assert torch.equal(got[2], a(model.b[ids], -1) @ a(x, 0))
        assert torch.equal(got[3][0], a(x, -1) @ a(model.cache[ids] + 1, 0))


def test_the_grouped_product_of_transformers(quantize):
    import_extra("transformers", "hf")
    product = torch.ops.transformers.grouped_mm_fallback
    model = Call(lambda x, offsets, experts: product(x, experts, offsets), (3, 40, 24)).eval()
    inputs = (torch.randn(8, 40), torch.tensor([3, 3, 8]))
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x, offsets = inputs
    with torch.no_grad():
        want = product(a(x, -1), w(model.p[0], -2), offsets)
        assert torch.equal(converted(*inputs), want) and torch.equal(prepared, want)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_of_transformers(implementation, quantize):
    transformers = import_extra("transformers", "hf")
    options = dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1) | {"num_attention_heads": 2}
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, vocab_size=64, num_local_experts=4, use_cache=False, **options
    )
    model, inputs = transformers.MixtralForCausalLM(config).eval(), (torch.randint(64, (1, 6)),)
    model.set_experts_implementation(implementation)
    prepared, _, converted = quantize(torch.export.export(model, inputs, strict=False), BOTH, inputs)
    with torch.no_grad():
        assert torch.equal(converted(*inputs)["logits"], prepared["logits"])
        experts = model.model.layers[0].mlp.experts
        for name in ("gate_up_proj", "down_proj"):  # (experts, out, in)
            weight = getattr(experts, name)
            state = {n.rpartition(".")[2]: t for n, t in converted.state_dict().items() if f"experts.{name}" in n}
            data, scale = state[f"{name}_data"], state[f"{name}_scale"]
            transposed = implementation == "grouped_mm"  # the operator takes (experts, in, out)
            got = pt2mx.dequantize_mx(data, scale, W, axis=1 if transposed else 2)
            assert torch.equal(got.transpose(1, 2) if transposed else got, w(weight, -1))
    experts = [o for o in pt2mx.quantization_report(converted).operators if o.module.endswith("experts")]
    operator = "aten.bmm" if implementation == "batched_mm" else "transformers.grouped_mm_fallback"
    assert [o.operator for o in experts] == [operator] * 2
    assert all({o.role for o in e.operands if o.spec} == {"activation", "weight"} for e in experts)


@pytest.mark.parametrize("inside", [False, True])
def test_flex_attention(inside, quantize):
    """Also where `forward` makes the mask: the graph then calls functions of vmap for what they do, not return."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal():
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, device="cpu")

    class Flex(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None if inside else causal()

        def forward(self, q, k, v):
            return flex_attention(q, k, v, block_mask=causal() if inside else self.mask)

    inputs = tuple(torch.randn(1, 2, 20, 32) for _ in range(3))
    exported = torch.export.export(Flex().eval(), inputs)
    assert "flex_attention" in {operator_name(node.target) for node in exported.graph.nodes}
    prepared, _, converted = quantize(exported, BOTH, inputs)
    q, k, v = inputs
    with torch.no_grad():
        assert torch.equal(converted(*inputs), exported.module()(a(q, -1), a(k, -1), a(v, -1)))
        assert torch.equal(converted(*inputs), prepared)


@pytest.mark.parametrize(
    ("function", "input_shapes", "parameter_shapes", "batched"),
    [
        (lambda x, m: torch.einsum("bqd,od->bqo", x, m), [(3, 5, 40)], [(8, 40)], (0,)),
        (lambda x, y: torch.einsum("bqd,bkd->bqk", x, y), [(3, 5, 40), (3, 6, 40)], [], (0, 0)),
        (lambda x, m: F.conv_transpose1d(x, m, groups=2), [(3, 40, 5)], [(40, 6, 3)], (0,)),
        (lambda b, x, y: torch.baddbmm(b, x, y), [(3, 5, 8), (3, 5, 40), (3, 40, 8)], [], (0, 0, 0)),
        (lambda q, k, v: sdpa(q, k, v), [(3, 2, 5, 20), (3, 2, 7, 20), (3, 2, 7, 20)], [], (0, 0, 0)),
        (lambda x, m: torch.tensordot(x, m, 1), [(3, 5, 40)], [(40, 8)], (0,)),
    ],
)
def test_dynamic_batch(function, input_shapes, parameter_shapes, batched, quantize):
    model = Call(function, *parameter_shapes).eval()
    inputs = tuple(torch.randn(shape) for shape in input_shapes)
    shapes = tuple({axis: torch.export.Dim("batch")} for axis in batched)
    exported = torch.export.export(model, inputs, dynamic_shapes=(shapes,))
    _, prepared, converted = quantize(exported, BOTH, inputs)
    again = torch.export.export(converted, inputs, dynamic_shapes=shapes).module()
    for batch in (3, 1, 9):
        other = tuple(torch.randn(batch, *shape[1:]) for shape in input_shapes)
        with torch.no_grad():
            assert torch.equal(converted(*other), prepared(*other))
            assert torch.equal(again(*other), converted(*other))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")
def test_a_recurrent_layer_of_any_batch_and_length(quantize):
    model, inputs = nn.LSTM(40, 20, batch_first=True).eval(), (torch.randn(3, 5, 40),)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim.AUTO},)
    _, prepared, converted = quantize(torch.export.export(model, inputs, dynamic_shapes=shapes), BOTH, inputs)
    for shape in ((3, 5, 40), (1, 5, 40), (4, 5, 40)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert torch.equal(converted(x)[0], prepared(x)[0])


def test_weights_behind_casts_and_splits(quantize):
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(60, 40))
            self.small = nn.Parameter(torch.randn(8, 40, dtype=torch.bfloat16))

        def forward(self, x):
            q, k, v = self.qkv.chunk(3)
            return F.linear(x, q), F.linear(x, k), x @ v.t(), F.linear(x, self.small.float())

    model, inputs = Behind().eval(), (torch.randn(3, 40),)
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x = a(inputs[0], -1)
    with torch.no_grad():
        q, k, v = model.qkv.chunk(3)
        want = F.linear(x, w(q, -1)), F.linear(x, w(k, -1)), x @ w(v.t(), 0), F.linear(x, w(model.small.float(), -1))
        for got, expected, before in zip(converted(*inputs), want, prepared, strict=True):
            assert torch.equal(got, expected) and torch.equal(got, before)
    assert {t.dtype for t in converted.state_dict().values()} == {torch.uint8}


def test_tied_embedding_and_head_are_one_packed_copy(quantize):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    model, inputs = Tied().eval(), (torch.randint(50, (2, 5)),)
    exported = torch.export.export(model, inputs)
    prepared, _, converted = quantize(exported, BOTH, inputs)
    with torch.no_grad():
        table = w(model.head.weight, -1)
        assert torch.equal(converted(*inputs), F.linear(a(F.embedding(inputs[0], table), -1), table))
        assert torch.equal(converted(*inputs), prepared)
    assert len(converted.state_dict()) == 2
    other = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    other.set_module_name("head", MXQuantizationConfig(activation=A, weight="mxint8"))
    prepared, _, converted = quantize(exported, other, inputs)
    assert len(converted.state_dict()) == 4 and torch.equal(converted(*inputs), prepared)


def test_an_outer_product_is_left_alone(quantize):
    """Rotary embeddings multiply positions and frequencies: quantizing positions gains nothing and breaks them."""
    model = Call(torch.matmul)
    inputs = (torch.randn(2, 8, 1), torch.randn(2, 1, 8))
    _, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert torch.equal(converted(*inputs), model(*inputs))
    assert "outer product" in pt2mx.quantization_report(converted).operators[0].reason


def test_integer_operands_are_left_alone(quantize):
    class Masked(nn.Module):
        def forward(self, x):
            return (torch.ones(4, 4, dtype=torch.int64) @ (x > 0).long()).float() @ x

    inputs = (torch.randn(4, 4),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    _, _, converted = quantize(torch.export.export(Masked(), inputs), quantizer, inputs)
    product = (torch.ones(4, 4, dtype=torch.int64) @ (inputs[0] > 0).long()).float()
    assert torch.equal(converted(*inputs), a(product, -1) @ a(inputs[0], -2))
    reasons = [o.reason for o in pt2mx.quantization_report(converted).operators]
    assert "int64" in reasons[0] and reasons[1] is None


def test_two_consumers_that_need_different_blocks_are_both_right(quantize):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)

        def forward(self, x):
            return self.first(x), self.second(x), x @ x

    model, inputs = Two().eval(), (torch.randn(40, 40),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    quantizer.set_module_name("second", MXQuantizationConfig(activation="mxfp4{8}", weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    x = inputs[0]
    want = (
        F.linear(a(x, -1), w(model.first.weight, -1), model.first.bias),
        F.linear(fake_quantize_mx(x, "mxfp4{8}"), w(model.second.weight, -1), model.second.bias),
        a(x, -1) @ a(x, -2),
    )
    got = converted(x)
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(p, c) for p, c in zip(prepared, got, strict=True))


def test_what_vmap_batches_is_left_alone(quantize):
    model = Call(
        lambda x, weight, head: torch.vmap(lambda row: F.linear(row, weight))(x) @ head, (8, 16), (8, 4)
    ).eval()
    x = torch.randn(3, 16)
    config = MXQuantizationConfig(weight=W, activation=A)
    program = torch.export.export(model, (x,))
    want, prepared, converted = quantize(program, MXQuantizer().set_global(config), (x,))
    weight, head = model.p
    assert torch.equal(want, a(x @ w(weight, 1).t(), 1) @ w(head, 0)) and torch.equal(converted(x), want)
    assert "is inside torch.vmap" in pt2mx.quantization_report(prepared).operators[0].reason
