import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from pt2mx import MXConfig, MXError, MXTensor, QLinearConfig, dtypes, quantize_linear_
from pt2mx.torchmx import MXInferenceLinear

QCONFIG = QLinearConfig(
    weights_config=MXConfig(elem_dtype_name="float6_e3m2", block_size=32),
    activations_config=MXConfig(elem_dtype_name="float8_e4m3", block_size=32),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(40, 96), nn.Linear(96, 40, bias=False)
        self.norm = nn.LayerNorm(40)
        self.shared = self.down

    def forward(self, x):
        return self.norm(x + self.shared(F.gelu(self.up(x))))


def test_the_readme_of_torchmx():
    x_hp = torch.randn(128, 128, dtype=torch.bfloat16)
    x_mx = MXTensor.to_mx(x_hp, elem_dtype=dtypes.float8_e4m3, block_size=32)
    x_hp_reconstructed = x_mx.to_dtype(torch.bfloat16)
    y_hp = torch.randn(128, 128, dtype=torch.bfloat16)
    y_mx = MXTensor.to_mx(y_hp, elem_dtype=dtypes.float6_e3m2, block_size=32)
    out_bf16 = torch.matmul(x_mx, y_mx)
    assert torch.equal(x_hp_reconstructed, pt2mx.fake_quantize_mx(x_hp, "mxfp8_e4m3"))
    assert torch.equal(out_bf16, x_hp_reconstructed @ pt2mx.fake_quantize_mx(y_hp, "mxfp6_e3m2"))

    from pt2mx.torchmx.config import MXConfig, QLinearConfig
    from pt2mx.torchmx.quant_api import quantize_linear_

    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()).to(torch.bfloat16)
    float_model = copy.deepcopy(model)
    qconfig = QLinearConfig(
        weights_config=MXConfig(elem_dtype_name="float6_e3m2", block_size=32),
        activations_config=MXConfig(elem_dtype_name="float8_e4m3", block_size=32),
    )
    quantize_linear_(model=model, qconfig=qconfig)
    x_hp = torch.randn(16, 128, dtype=torch.bfloat16)
    y_mx = model(x_hp)
    expected = x_hp
    for layer in float_model:
        expected = dequantize_then_linear(layer, expected) if isinstance(layer, nn.Linear) else layer(expected)
    assert torch.equal(y_mx, expected)


def dequantize_then_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    w = pt2mx.dequantize_mx(*pt2mx.quantize_mx(layer.weight, "fp6_e3m2")[::-1], "fp6_e3m2", target_dtype=x.dtype)
    return F.linear(pt2mx.fake_quantize_mx(x, "fp8_e4m3"), w, layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers(dtype):
    model, x = Block().to(dtype), torch.randn(2, 3, 40, dtype=dtype)
    float_model = copy.deepcopy(model)
    quantize_linear_(model, QCONFIG)
    h = F.gelu(dequantize_then_linear(float_model.up, x))
    w = MXTensor.to_mx(float_model.down.weight, "fp6_e3m2").to_dtype()
    down = F.linear(pt2mx.fake_quantize_mx(h, "fp8_e4m3"), w)
    assert torch.equal(model(x), float_model.norm(x + down))


def test_modules():
    model = Block().eval()
    bias = model.up.bias
    quantize_linear_(model, QCONFIG)
    assert type(model.up) is MXInferenceLinear and type(model.norm) is nn.LayerNorm
    assert model.shared is model.down and model.up.bias is bias and not model.up.training
    assert isinstance(model.up.weight, MXTensor) and not model.up.weight.requires_grad
    assert model.up.weight.qdata.numel() == 96 * 40 * 6 // 8
    assert repr(model.down) == (
        "MXInferenceLinear(in_features=96, out_features=40, bias=False, weight=mxfp6_e3m2{32}, "
        "activation=mxfp8_e4m3{32})"
    )


def test_gradients_reach_the_input():
    model, x = Block(), torch.randn(2, 40, requires_grad=True)
    quantize_linear_(model, QCONFIG)
    model(x).pow(2).sum().backward()
    assert x.grad.abs().min() > 0 and model.up.bias.grad.abs().sum() > 0


def test_all_or_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 8).double()))
    before = list(model.modules())
    with pytest.raises(MXError, match=r"2\.0: cannot quantize a tensor of dtype torch.float64"):
        quantize_linear_(model, QCONFIG)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_errors():
    with pytest.raises(MXError, match="cannot replace itself"):
        quantize_linear_(nn.Linear(4, 4), QCONFIG)
    with pytest.raises(MXError, match=r"has no nn\.Linear"):
        quantize_linear_(nn.Sequential(nn.ReLU()), QCONFIG)
    with pytest.raises(MXError, match="qconfig must be a QLinearConfig"):
        quantize_linear_(nn.Sequential(nn.Linear(4, 4)), QCONFIG.to_dict())
    with pytest.raises(MXError, match=r"takes an nn\.Linear and a QLinearConfig"):
        MXInferenceLinear.from_float(nn.ReLU(), QCONFIG)
    model = Block()
    quantize_linear_(model, QCONFIG)
    with pytest.raises(MXError, match="quantized already"):
        quantize_linear_(model, QCONFIG)
    model.load_state_dict(Block().state_dict(), assign=True)
    with pytest.raises(MXError, match="is a plain tensor now"):
        model(torch.randn(2, 40))


def test_persistence():
    model, x = Block(), torch.randn(2, 40)
    quantize_linear_(model, QCONFIG)
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = Block()
    quantize_linear_(other, QCONFIG)
    assert not torch.equal(other(x), y)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(other(x), y)


def test_meta_model_takes_a_checkpoint():
    model, x = Block(), torch.randn(2, 40)
    with torch.device("meta"):
        other = Block()
    for m in (model, other):
        quantize_linear_(m, QCONFIG)
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(x), model(x))


@pytest.mark.compiled  # test_llm.py compiles a model
def test_compile(compiler):
    model, x = Block(), torch.randn(2, 40)
    quantize_linear_(model, QCONFIG)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))
