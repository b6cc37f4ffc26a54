"""Each operator, quantized by the flow, equals itself on operands quantized by hand along its reduction axis."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx, ops

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


def conv(f, spatial, **options):
    return (
        lambda x, weight, bias: f(x, weight, bias, **options),
        lambda x, weight, bias: f(a(x, -1 - spatial), w(weight, 1), bias, **options),
    )


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


MASK = torch.ones(5, 7, dtype=torch.bool).tril(2)
CASES = {
    # name: (function, the same by hand, input shapes, parameter shapes)
    "linear": (F.linear, lambda x, m, b: F.linear(a(x, -1), w(m, -1), b), [(3, 40)], [(8, 40), (8,)]),
    "linear 1-d": (F.linear, lambda x, m: F.linear(a(x, 0), w(m, -1)), [(40,)], [(8, 40)]),
    "linear 3-d": (F.linear, lambda x, m: F.linear(a(x, -1), w(m, -1)), [(2, 3, 40)], [(8, 40)]),
    "addmm": (
        lambda x, b, m: torch.addmm(b, x, m),
        lambda x, b, m: torch.addmm(b, a(x, -1), w(m, -2)),
        [(3, 40)],
        [(8,), (40, 8)],
    ),
    "mm": (torch.mm, lambda x, m: torch.mm(a(x, -1), w(m, -2)), [(3, 40)], [(40, 8)]),
    "mm computed": (torch.mm, lambda x, y: torch.mm(a(x, -1), a(y, -2)), [(3, 40), (40, 8)], []),
    "mm weight first": (lambda x, m: m @ x, lambda x, m: w(m, -1) @ a(x, -2), [(40, 8)], [(3, 40)]),
    "bmm": (torch.bmm, lambda x, y: torch.bmm(a(x, -1), a(y, -2)), [(2, 3, 40), (2, 40, 8)], []),
    "matmul 4-d": (torch.matmul, lambda x, y: a(x, -1) @ a(y, -2), [(2, 2, 3, 40), (2, 2, 40, 8)], []),
    "matmul vector": (torch.matmul, lambda x, y: a(x, -1) @ a(y, 0), [(3, 40), (40,)], []),
    "matmul vectors": (torch.matmul, lambda x, y: a(x, 0) @ a(y, 0), [(40,), (40,)], []),
    "x @ x": (lambda x: x @ x, lambda x: a(x, -1) @ a(x, -2), [(40, 40)], []),
    "conv1d": (*conv(F.conv1d, 1), [(2, 20, 9)], [(6, 20, 3), (6,)]),
    "conv1d unbatched": (*conv(F.conv1d, 1), [(20, 9)], [(6, 20, 3), (6,)]),
    "conv2d": (*conv(F.conv2d, 2, stride=2), [(2, 20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv2d same": (*conv(F.conv2d, 2, padding="same"), [(2, 20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv2d grouped": (*conv(F.conv2d, 2, groups=2), [(2, 20, 5, 5)], [(6, 10, 3, 3), (6,)]),
    "conv2d unbatched": (*conv(F.conv2d, 2), [(20, 9, 9)], [(6, 20, 3, 3), (6,)]),
    "conv3d": (*conv(F.conv3d, 3), [(2, 20, 4, 4, 4)], [(6, 20, 3, 3, 3), (6,)]),
    "conv3d valid": (*conv(F.conv3d, 3, padding="valid"), [(2, 20, 4, 4, 4)], [(6, 20, 3, 3, 3), (6,)]),
    "sdpa": (
        lambda q, k, v: sdpa(q, k, v, attn_mask=MASK, scale=0.3),
        lambda q, k, v: sdpa(a(q, -1), a(k, -1), a(v, -2), attn_mask=MASK, scale=0.3),
        [(2, 2, 5, 20), (2, 2, 7, 20), (2, 2, 7, 20)],
        [],
    ),
    "sdpa of one tensor": (
        lambda x: sdpa(x, x, x, is_causal=True),
        lambda x: sdpa(a(x, -1), a(x, -1), a(x, -2), is_causal=True),
        [(2, 2, 7, 20)],
        [],
    ),
    "transposed weight": (lambda x, m: x @ m.t(), lambda x, m: a(x, -1) @ w(m.t(), -2), [(3, 40)], [(8, 40)]),
    "computed weight": (
        lambda x, m, n: F.linear(x, m * n),
        lambda x, m, n: F.linear(a(x, -1), w(m * n, -1)),
        [(3, 40)],
        [(8, 40), (8, 40)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operands_are_quantized_along_the_reduction(case, quantize):
    function, by_hand, input_shapes, parameter_shapes = CASES[case]
    model = Call(function, *parameter_shapes).eval()
    inputs = tuple(torch.randn(shape) for shape in input_shapes)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), prepared)
    assert torch.equal(converted(*inputs), by_hand(*inputs, *model.p))
    assert not converted.graph.find_nodes(op="call_function", target=ops.quantize_mx) or input_shapes


def test_embedding_rows(quantize):
    model = nn.Sequential(nn.Embedding(50, 40, padding_idx=3)).eval()
    inputs = (torch.randint(50, (2, 5)),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), prepared)
    assert torch.equal(converted(*inputs), F.embedding(inputs[0], w(model[0].weight, -1)))
    assert set(converted.state_dict()) == {"0.weight_data", "0.weight_scale"}


def test_bias_and_output(quantize):
    model, inputs = nn.Linear(40, 24).eval(), (torch.randn(3, 40),)
    config = MXQuantizationConfig(activation=A, weight=W, bias=W, output="mxint8")
    prepared, _, converted = quantize(torch.export.export(model, inputs), MXQuantizer().set_global(config), inputs)
    want = F.linear(a(inputs[0], -1), w(model.weight, -1), w(model.bias, -1))
    assert torch.equal(converted(*inputs), fake_quantize_mx(want, "mxint8")) and torch.equal(
        converted(*inputs), prepared
    )


def test_an_outer_product_is_left_alone(quantize):
    """Rotary embeddings multiply positions and frequencies: quantizing positions gains nothing and breaks them."""
    model = Call(torch.matmul)
    inputs = (torch.randn(2, 8, 1), torch.randn(2, 1, 8))
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    _, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
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
        model.first.weight.new_empty(0),
        F.linear(fake_quantize_mx(x, "mxfp4{8}"), w(model.second.weight, -1), model.second.bias),
        a(x, -1) @ a(x, -2),
    )
    got = converted(x)
    assert torch.equal(got[0], F.linear(a(x, -1), w(model.first.weight, -1), model.first.bias))
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    assert all(torch.equal(p, c) for p, c in zip(prepared, got, strict=True))
