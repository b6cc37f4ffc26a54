"""float32 matmuls of quantized activations run in bfloat16 on a GPU's tensor cores."""

import pytest
import torch
from torch import nn

from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor
from pt2mx.extras import import_extra
from pt2mx.fx.passes.bf16_matmul import use_bfloat16_tensor_cores
from pt2mx.ops.attention import matmul_bfloat16
from pt2mx.ops.linear import grouped_linear_mx, linear_mx
from tests.compare import relative_error
from tests.every_device import everywhere
from tests.flow import convert
from tests.graph import calls, count
from tests.models import chain


def net(width=64):
    return chain(up=nn.Linear(width, 2 * width), gelu=nn.GELU(), down=nn.Linear(2 * width, width))


def converted_and_lowered(recipe, x, monkeypatch, model=None):
    """Lower as on a machine whose CPU has no bfloat16 instructions."""
    monkeypatch.setattr("pt2mx.fx.passes.bf16_matmul._is_faster_in_bf16", lambda *args: False)
    converted = convert((model or net()).to(x.dtype), (x,), recipe)
    lowered = lower_to_inductor(converted)
    everywhere(use_bfloat16_tensor_cores)(lowered)
    return converted, lowered


@pytest.mark.parametrize("recipe", ["mxfp8", "mxint8", "mxfp4"])
def test_x_is_cast_and_the_result_is_float32(recipe, monkeypatch):
    x = torch.randn(80, 64)
    converted, lowered = converted_and_lowered(recipe, x, monkeypatch)
    for matmul in calls(lowered, linear_mx):
        assert matmul.args[0].meta["val"].dtype == torch.bfloat16 and matmul.args[-1] == torch.float32
    assert count(lowered, linear_mx) == 2
    assert relative_error(lowered(x), converted(x)) < 1e-6


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("mxfp8", torch.bfloat16), ("mxfp8", torch.float16), ("mxfp4_weight_only", torch.float32)]
)
def test_others_stay(recipe, dtype, monkeypatch):
    _, lowered = converted_and_lowered(recipe, torch.randn(80, 64, dtype=dtype), monkeypatch)
    assert {matmul.args[-1] for matmul in calls(lowered, linear_mx)} == {None}


@pytest.mark.parametrize(("factor", "first"), [(0.0, torch.float32), (2.0**-120, None)])
def test_blocks_of_zeros_have_any_scale_and_weights_of_tiny_values_stay(factor, first, monkeypatch):
    model = net()
    with torch.no_grad():
        model.up.weight[3, :32] *= factor
    _, lowered = converted_and_lowered("mxfp8", torch.randn(80, 64), monkeypatch, model)
    assert [matmul.args[-1] for matmul in calls(lowered, linear_mx)] == [first, torch.float32]


class Experts(nn.Module):
    """Experts as transformers exports them in float32, in their own operator."""

    def __init__(self):
        super().__init__()
        import_extra("transformers", "hf")
        self.matmul = torch.ops.transformers.grouped_mm_fallback
        self.up, self.down = nn.Parameter(torch.randn(3, 128, 64) / 8), nn.Parameter(torch.randn(3, 64, 128) / 11)

    def forward(self, x, ends):
        return self.matmul(nn.functional.gelu(self.matmul(x, self.up.mT, ends)), self.down.mT, ends)


def experts():
    """Return the arguments of the model, and the converted model."""
    args = torch.randn(80, 64), torch.tensor([30, 30, 80], dtype=torch.int32)
    config = get_default_mx_quantization_config("mxfp8", "mxfp8")
    return args, convert(Experts(), args, MXQuantizer().set_operator_type("transformers.grouped_mm_fallback", config))


@pytest.mark.parametrize("tiny", [False, True])
def test_experts(tiny):
    args, converted = experts()
    lowered = lower_to_inductor(converted)
    matmuls = calls(lowered, grouped_linear_mx)
    if tiny:
        lowered.get_buffer(matmuls[0].args[2].target).fill_(1)  # values that bfloat16 does not represent
    everywhere(use_bfloat16_tensor_cores)(lowered)
    assert [matmul.args[6] for matmul in matmuls] == [None if tiny else torch.float32, torch.float32]
    if not tiny:
        assert {matmul.args[0].meta["val"].dtype for matmul in matmuls} == {torch.bfloat16}
        assert relative_error(lowered(*args), converted(*args)) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_experts_on_a_gpu(mode, compiler):
    """CUDA graphs work too, because nothing waits for the GPU."""
    args, converted = experts()
    lowered, want = lower_to_inductor(converted, "cuda"), converted(*args)
    assert [matmul.args[6] for matmul in calls(lowered, grouped_linear_mx)] == [torch.float32] * 2
    args = [x.cuda() for x in args]
    with torch.no_grad():
        assert relative_error(lowered(*args), want) < 1e-6
        compiled = torch.compile(lowered, mode=mode, fullgraph=True)
        for _ in range(3):
            assert relative_error(compiled(*args), want) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxint8", "mxfp4"])
def test_on_a_gpu(recipe, unpack):
    x = torch.randn(3, 100, 256)
    converted = convert(net(256), (x,), recipe)
    lowered, want = lower_to_inductor(converted, "cuda", unpack=unpack), converted(x)
    assert count(lowered, linear_mx) == (0 if unpack else 2)
    assert count(lowered, matmul_bfloat16) == (2 if unpack else 0)
    for run in (lowered, torch.compile(lowered)):
        got = run(x.cuda())
        assert got.dtype == torch.float32 and relative_error(got.cpu(), want) < 1e-6
