import operator

import pytest
import torch

from pt2mx.pt2e.report.contractions import is_contraction, operator_path

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
def test_sums_of_products(name):
    packet = getattr(aten, name)
    assert all(is_contraction(getattr(packet, overload)) for overload in packet.overloads())


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
    assert not is_contraction(target)


def test_custom_and_higher_order_operators():
    library = torch.library.Library("pt2mx_test_names", "DEF")
    library.define("fused_gemm(Tensor a, Tensor b) -> Tensor")
    library.define("grouped_mm_fallback(Tensor a, Tensor b) -> Tensor")
    library.define("norm(Tensor a) -> Tensor")
    operators = torch.ops.pt2mx_test_names
    assert is_contraction(operators.fused_gemm.default) and is_contraction(operators.grouped_mm_fallback.default)
    assert not is_contraction(operators.norm.default)
    assert is_contraction(torch.ops.higher_order.flex_attention)
    assert operator_path(torch.ops.higher_order.flex_attention) == "higher_order.flex_attention"
    library._destroy()
