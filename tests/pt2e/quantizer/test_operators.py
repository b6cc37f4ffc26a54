"""Each operator, quantized by the flow, equals itself on operands quantized by hand along its reduction axis."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from pt2mx import ops
from pt2mx.pt2e.quantizer.operators import OPERANDS, is_matmul_like, operands_of, operator_name, operator_path
from tests.models import module_of
from tests.quantized_by_hand import BOTH, Call, a, w

aten = torch.ops.aten


def conv(f, spatial, axis=1, **options):
    return (
        lambda x, weight, bias: f(x, weight, bias, **options),
        lambda x, weight, bias: f(a(x, -1 - spatial), w(weight, axis), bias, **options),
    )


def pair(f, first, second):
    """An operator on two computed tensors."""
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
    # operator and variant: (function, the same written by hand, input shapes, parameter shapes)
    "linear": (F.linear, lambda x, m, b: F.linear(a(x, -1), w(m, -1), b), [(3, 40)], [(8, 40), (8,)]),
    "linear 1-d": (F.linear, lambda x, m: F.linear(a(x, 0), w(m, -1)), [(40,)], [(8, 40)]),
    "linear 3-d": (F.linear, lambda x, m: F.linear(a(x, -1), w(m, -1)), [(2, 3, 40)], [(8, 40)]),
    "linear of a matmul of parameters": (
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
    "conv2d depthwise": (*conv(F.conv2d, 2, 3, groups=40), [(2, 40, 5, 5)], [(40, 1, 3, 3), (40,)]),
    "conv2d depthwise of rows": (*conv(F.conv2d, 2, 2, groups=40), [(2, 40, 5, 5)], [(40, 1, 5, 1), (40,)]),
    "conv2d depthwise of one tap": (*conv(F.conv2d, 2, groups=40), [(2, 40, 5, 5)], [(40, 1, 1, 1), (40,)]),
    "conv1d of one channel": (*conv(F.conv1d, 1), [(2, 1, 50)], [(6, 1, 40), (6,)]),
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
#: rows that are tested below and in other files of this folder
ELSEWHERE = {
    "aten.embedding", "aten.embedding_bag", "aten.embedding_bag.padding_idx", "flex_attention",
    "transformers.grouped_mm_fallback",
    "aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input",
    "aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell",
}  # fmt: skip


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


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("inside", [False, True])
def test_flex_attention(inside, quantize):
    """`forward` may make the mask; the graph then calls functions of vmap for their effect."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal():
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, device="cpu")

    inputs = tuple(torch.randn(1, 2, 20, 32) for _ in range(3))
    flex = module_of(
        lambda self, q, k, v: flex_attention(q, k, v, block_mask=causal() if inside else self.mask),
        mask=None if inside else causal(),
    )
    exported = torch.export.export(flex.eval(), inputs)
    assert "flex_attention" in {operator_name(node.target) for node in exported.graph.nodes}
    prepared, _, converted = quantize(exported, BOTH, inputs)
    q, k, v = inputs
    with torch.no_grad():
        assert torch.equal(converted(*inputs), exported.module()(a(q, -1), a(k, -1), a(v, -1)))
        assert torch.equal(converted(*inputs), prepared)


@pytest.mark.compiled_cases("*batched1", "*batched4", "*batched0")
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


@pytest.mark.parametrize(
    "name",
    """mm bmm baddbmm addmm addbmm addmv mv dot vdot inner matmul linalg_matmul linalg_multi_dot chain_matmul linear
    einsum tensordot bilinear _trilinear cdist convolution _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _grouped_mm scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention
    _scaled_mm _int_mm _native_multi_head_attention _transformer_encoder_layer_fwd baddbmm_ mkldnn_linear""".split(),
)
def test_matmul_like_operators(name):
    packet = getattr(aten, name)
    assert all(is_matmul_like(getattr(packet, overload)) for overload in packet.overloads())


@pytest.mark.parametrize(
    "target",
    [
        aten.add.Tensor, aten.mul.Tensor, aten.embedding.default, aten.upsample_bilinear2d.default, aten.relu.default,
        aten.upsample_linear1d.default, aten.convolution_backward.default, aten.linear_backward.default,
        aten.outer.default, aten.cross_entropy_loss.default, aten.bincount.default,
        torch.ops.pt2mx.quantize_mx.default, torch.cond, operator.getitem, "submodule",
    ],
)  # fmt: skip
def test_others(target):
    assert not is_matmul_like(target)


def test_custom_and_higher_order_operators():
    library = torch.library.Library("pt2mx_test_names", "DEF")
    library.define("fused_gemm(Tensor a, Tensor b) -> Tensor")
    library.define("grouped_mm_fallback(Tensor a, Tensor b) -> Tensor")
    library.define("norm(Tensor a) -> Tensor")
    operators = torch.ops.pt2mx_test_names
    assert is_matmul_like(operators.fused_gemm.default) and is_matmul_like(operators.grouped_mm_fallback.default)
    assert not is_matmul_like(operators.norm.default)
    assert is_matmul_like(torch.ops.higher_order.flex_attention)
    assert operator_path(torch.ops.higher_order.flex_attention) == "higher_order.flex_attention"
    library._destroy()


def call(target, *args, **kwargs):
    """A call whose tensors are "x" and "y"."""
    graph = Graph()
    tensors = {name: graph.placeholder(name) for name in "xyz"}
    args = [[tensors[t] for t in a] if isinstance(a, tuple) else a for a in args]
    return graph.call_function(target, tuple(args), kwargs)


def axes_of(*arguments, **kwargs):
    return tuple(operand.axis for operand in operands_of(call(*arguments, **kwargs)))


@pytest.mark.parametrize(
    ("equation", "axes"),
    [
        ("ij,jk->ik", (1, 0)),
        ("bij, bkj -> bik", (2, 2)),
        ("ij,jk", (1, 0)),  # shared labels are reduced
        ("bqhd,hdo->bqo", (3, 1)),  # of h and d the last
        ("bhqd,dho->bqo", (3, 0)),
        ("...ij,...jk->...ik", (-1, -2)),
        ("j...i,j...->i...", (0, 0)),
        ("aB,bB->ab", (1, 1)),
        ("ijk,jl->l", (1, 0)),  # i and k are summed in one factor alone
        ("ij,kl->ijkl", ()),
        ("ij,ij->ij", ()),
        ("ii,ij->j", ()),
        ("ij,jj->i", ()),
    ],
)
def test_einsum(equation, axes):
    assert axes_of(aten.einsum.default, equation, ("x", "y")) == axes


@pytest.mark.parametrize(("equation", "tensors"), [("ij->i", ("x",)), ("ij,jk,kl->il", ("x", "y", "z"))])
def test_einsum_of_another_number_of_tensors(equation, tensors):
    assert axes_of(aten.einsum.default, equation, tensors) == ()


def test_tensordot():
    assert axes_of(aten.tensordot.default, ("x",), ("y",), [1, 2], [0, 3]) == (2, 3)
    assert axes_of(aten.tensordot.default, ("x",), ("y",), [], []) == ()


def test_vecdot():
    assert axes_of(aten.linalg_vecdot.default, ("x",), ("y",)) == (-1, -1)
    assert axes_of(aten.linalg_vecdot.default, ("x",), ("y",), dim=0) == (0, 0)
