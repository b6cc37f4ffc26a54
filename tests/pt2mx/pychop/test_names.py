"""Every name of pychop's surface, each with a value; positions are as in pychop 0.6.2."""

import numpy as np
import pytest
import torch

from pt2mx import pychop

X = np.array([1.0, 2.4, -0.3, 7.0], np.float32)
#: X in the format and its integers: blocks have exponents -6 (E4M3) and 2 (int8)
E4M3, INT8 = [1.0, 2.5, -0.3125, 7.0], [1.0, 2.375, -0.3125, 7.0]


def compare_mx_formats():
    return [row.format for row in pychop.compare_mx_formats(X.tolist(), ["mxint8", (4, 3)], 4).rows]


def convert_linear_to_mx():
    linear = torch.nn.Linear(4, 1, bias=False)
    linear.weight.data = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    model = pychop.convert_linear_to_mx(torch.nn.Sequential(linear), "mxint8", 4, True, False, True)
    return type(model[0]).__name__, model(torch.from_numpy(X)).item()


def attention():
    layer = pychop.MXAttention(4, 2, "mxint8", 4, 0.0, False).eval()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        projection.weight.data = torch.eye(4)
    return layer(torch.from_numpy(X).view(1, 1, 4)).flatten().tolist()  # of one token: itself


def linear():
    layer = pychop.MXLinear(4, 1, False, "mxint8", None, 4, True, True)
    layer.weight.data = torch.ones(1, 4)
    return layer(torch.from_numpy(X)).item()  # the sum of INT8, 10.0625, quantized too


NAMES = {
    "MX_FORMATS": (
        lambda: list(pychop.MX_FORMATS),
        ["mxfp8_e5m2", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"],
    ),
    "MXSpec": (lambda: repr(pychop.MXSpec("MINE", 2, 3, 16, 5, 0)), "MXSpec(name='MINE', E2M3, block_size=16)"),
    "create_mx_spec": (lambda: pychop.create_mx_spec(5, 10).name, "CUSTOM_MX16_E5M10"),
    "mx_quantize": (lambda: pychop.mx_quantize(X, "mxfp8_e4m3", 32, 8, 0).tolist(), E4M3),
    "MXTensor": (lambda: pychop.MXTensor(X, "mxint8", 4, 8, 0).dequantize().tolist(), INT8),
    "MXQuantizerSTE": (lambda: pychop.MXQuantizerSTE("mxint8", 4, 8, 0)(torch.from_numpy(X)).tolist(), INT8),
    "create_mx_ste_quantizer": (
        lambda: pychop.create_mx_ste_quantizer(pychop.MX_FORMATS["mxint8"], 4, 8, 0)(X).tolist(),
        INT8,
    ),
    "MXLinear": (linear, 10.0),
    "MXAttention": (attention, INT8),
    "convert_linear_to_mx": (convert_linear_to_mx, ("MXLinear", 10.0625)),
    "compare_mx_formats": (compare_mx_formats, ["mxint8_full{4}", "mxfp8_e4m3_finite{4}"]),
}


@pytest.mark.parametrize("name", pychop.__all__)
def test_every_name_gives_its_value(name):
    call, value = NAMES[name]
    assert call() == value
