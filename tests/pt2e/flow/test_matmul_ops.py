import operator

import pytest
import torch
from torch import nn

from pt2mx import MXError, lower_to_inductor, quantization_report
from pt2mx.pt2e.flow.matmul_ops import is_matmul_like, operator_path
from tests.flow import convert

aten = torch.ops.aten


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


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(64, 8)), (torch.ones(2, 64),)),
        (nn.Sequential(nn.Embedding(8, 64)), (torch.arange(4),)),
    ],
    ids=["a matmul", "a gather"],
)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_packed_weights_are_refused(model, inputs, recipe):
    converted = convert(model, inputs, recipe)
    assert quantization_report(converted).weight_bits in (4.25, 8.25)
    with pytest.raises(MXError, match=r"reads a packed weight, as lower_to_inductor leaves it: report the converted"):
        quantization_report(lower_to_inductor(converted))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.0._flat_weights")  # export's
def test_operators_that_stay_are_reported_as_before():
    converted = convert(nn.Sequential(nn.LSTM(64, 32)), (torch.ones(3, 2, 64),), "mxfp8")
    before, after = quantization_report(converted), quantization_report(lower_to_inductor(converted))
    for total in ("bytes_before", "bytes_after", "values", "weight_bits"):
        assert getattr(after, total) == getattr(before, total), total
    specs = [[(o.role, o.spec) for o in report.operators[0].operands] for report in (before, after)]
    assert specs[0] == specs[1] and ("activation", "mxfp8_e4m3{32}") in specs[0]
    unpacked = quantization_report(lower_to_inductor(converted, unpack=True))
    assert unpacked.bytes_after == unpacked.bytes_before == before.bytes_before  # the weights are float again
