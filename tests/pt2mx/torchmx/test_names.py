"""Every public name of TorchMX 0.1.0 that is offered, each with a call that asserts a value, by module."""

import importlib
import operator

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.torchmx import dtypes
from pt2mx.torchmx.config import MXConfig, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.layers.mx_linear import MXInferenceLinear
from pt2mx.torchmx.mx_tensor import MXTensor

FP8 = MXConfig("float8_e4m3")
X = torch.arange(-32.0, 32.0).reshape(2, 32)
FP8_X = pt2mx.fake_quantize_mx(X, "mxfp8")


def layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 8))


def expected() -> torch.Tensor:
    linear = layer()[0]
    return nn.functional.linear(FP8_X, pt2mx.fake_quantize_mx(linear.weight, "mxfp8"), linear.bias)


def quantized_in_place(function, *arguments) -> torch.Tensor:
    model = layer()
    function(model, *arguments)
    return model(X)


def through_torchao(function) -> torch.Tensor:
    from torchao.quantization import quantize_

    model = layer()
    quantize_(model, function(weight_elem_dtype=dtypes.float8_e4m3))
    return model(X)


def formats_of_a_llama(function) -> dict[str, str]:
    transformers = import_extra("transformers", "hf")
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1))
    int8 = QLinearConfig(MXConfig("int8"), MXConfig("int8"))
    function(model, QAttentionConfig(int8), QLinearConfig(FP8, FP8))
    block = model.model.layers[0]
    layers = {"q_proj": block.self_attn.q_proj, "up_proj": block.mlp.up_proj}
    return {name: layer.weight._elem_dtype.name for name, layer in layers.items()}


def noop_gradient(function) -> torch.Tensor:
    x = torch.zeros_like(X, requires_grad=True)
    (function.apply(x, dtypes.float8_e4m3, 32) * X).sum().backward()
    assert type(x.grad) is MXTensor
    return x.grad.to_dtype()


def read_in(orig_dtype: property, dtype: torch.dtype) -> torch.Tensor:
    t = MXTensor.to_mx(X, dtypes.float8_e4m3, 32)
    orig_dtype.fset(t, dtype)
    return t.to_dtype()


def numbers(d: dtypes.DType) -> tuple:
    return (d.name, d.max, d.max_pow2, d.exponent_bias, d.exponent_bits, d.mantissa_bits, d.torch_dtype)


# (result of a call with the name, expected result)
NAMES = {
    "dtypes": {
        "DType": lambda c: (repr(c("a", 1.0, 0, 0, 0, 1, False, False)), "a"),
        "float8_e4m3": lambda d: (numbers(d), ("float8_e4m3", 448.0, 8, 7, 4, 3, torch.float8_e4m3fn)),
        "float6_e3m2": lambda d: (numbers(d), ("float6_e3m2", 28.0, 4, 3, 3, 2, None)),
        "float6_e2m3": lambda d: (numbers(d), ("float6_e2m3", 7.5, 2, 1, 2, 3, None)),
        "float4_e2m1": lambda d: (numbers(d), ("float4_e2m1", 6.0, 2, 1, 2, 1, None)),
        "int8": lambda d: (numbers(d), ("int8", 127.0, 6, 0, 0, 7, torch.int8)),
        "float64": lambda d: (numbers(d)[1:5], (torch.finfo(torch.float64).max, 1023, 1023, 11)),
        "float32": lambda d: (numbers(d)[1:5], (torch.finfo(torch.float32).max, 127, 127, 8)),
        "bfloat16": lambda d: (numbers(d)[1:5], (torch.finfo(torch.bfloat16).max, 127, 127, 8)),
        "float22_e8m13": lambda d: (numbers(d), ("float22_e8m13", 2.0**127 * (2 - 2.0**-13), 127, 127, 8, 13, None)),
        "e8m0": lambda d: (numbers(d), ("e8m0", 2.0**127, 127, 127, 8, 0, None)),
        "E8M0_EXPONENT_NAN_VAL": lambda value: (value, 255),
        "SUPPORTED_ELEM_DTYPES": lambda all_: ([d.name for d in all_[:2]], ["float8_e4m3", "float6_e3m2"]),
        "SUPPORTED_FP_ELEM_DTYPES": lambda all_: ((*all_, dtypes.int8), dtypes.SUPPORTED_ELEM_DTYPES),
        "STR_TO_SUPPORTED_ELEM_DTYPE": lambda d: (list(d.values()), list(dtypes.SUPPORTED_ELEM_DTYPES)),
    },
    "utils": {
        "pack_uint4": lambda f: (f(torch.tensor([1, 2, 15], dtype=torch.uint8)).tolist(), [0x12, 0xF0]),
        "unpack_uint4": lambda f: (f(torch.tensor([[0x12], [0xF0]], dtype=torch.uint8), 0).T.tolist(), [[1, 2, 15, 0]]),
        "tensor_size_hp_to_fp4x2": lambda f: (f(torch.Size((3, 7)), 1), [3, 4]),
        "tensor_size_fp4x2_to_hp": lambda f: (f(torch.Size((3, 4)), 0), [6, 4]),
    },
    "config": {
        "MXConfig": lambda c: (c("int8", 16).elem_dtype, dtypes.int8),
        "QLinearConfig": lambda c: (c(FP8, FP8).to_dict()["weights_config"], FP8.to_dict()),
        "QAttentionConfig": lambda c: (c(QLinearConfig(FP8, FP8)).is_qkv_quantization_enabled, False),
    },
    "mx_tensor": {
        "MXTensor": lambda c: (c.to_mx(X, dtypes.float8_e4m3, 32).to_dtype(torch.float32), FP8_X),
        "MXTensor.sum": lambda f: (f(MXTensor.to_mx(X, dtypes.float8_e4m3, 32), 0), FP8_X.sum(0)),
        "MXTensor._orig_dtype": lambda p: (read_in(p, torch.bfloat16), FP8_X.bfloat16()),
        "quantize_mx": lambda f: (
            f(data_hp=X, elem_dtype_name="float8_e4m3", block_size=32)[0].tolist(),
            [[124], [123]],
        ),
        "dequantize_mx": lambda f: (
            f(
                data_lp=torch.full((1, 2), 0x23, dtype=torch.uint8),
                shared_exp_e8m0=torch.tensor([[128]], dtype=torch.uint8),
                elem_dtype_name="float4_e2m1",
                block_size=4,
                target_dtype=torch.bfloat16,
                block_dim=1,
            ),
            torch.tensor([[2.0, 3.0, 2.0, 3.0]], dtype=torch.bfloat16),
        ),
        "ToMXConstrFunc": lambda f: (f.apply(X, dtypes.float8_e4m3, 32).to_dtype(), FP8_X),
        "FromMXConstrFunc": lambda f: (f.apply(MXTensor.to_mx(X, dtypes.float8_e4m3), torch.float32), FP8_X),
        "NoopFwToMXBw": lambda f: (noop_gradient(f), FP8_X),
    },
    "quant_api": {
        "quantize_linear_": lambda f: (quantized_in_place(f, QLinearConfig(FP8, FP8)), expected()),
        "quantize_llm_": lambda f: (formats_of_a_llama(f), {"q_proj": "int8", "up_proj": "float8_e4m3"}),
        "mx_dynamic_activation_mx_weights": lambda f: (through_torchao(f), expected()),
    },
    "layers.mx_linear": {
        "MXInferenceLinear": lambda c: (c.from_float(layer()[0], QLinearConfig(FP8, FP8))(X), expected())
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_names(module, name):
    value = operator.attrgetter(name)(importlib.import_module(f"pt2mx.torchmx.{module}"))
    got, want = NAMES[module][name](value)
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


@pytest.mark.parametrize("name", ["quantize_mx", "dequantize_mx"])
def test_names_of_operators(name):
    """The operators have the arguments of the functions."""
    check = NAMES["mx_tensor"][name]
    got, want = check(getattr(torch.ops.torchmx, name))
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_the_package_holds_the_chief_ones():
    import pt2mx.torchmx

    assert all(hasattr(pt2mx.torchmx, name) for name in pt2mx.torchmx.__all__)
    assert pt2mx.torchmx.MXTensor is MXTensor and pt2mx.torchmx.MXInferenceLinear is MXInferenceLinear
    assert pt2mx.dtypes.SUPPORTED_ELEM_DTYPES is dtypes.SUPPORTED_ELEM_DTYPES
