"""The target `tosa_mxfp`; ExecuTorch's Arm backend and TOSA's reference model where they are installed."""

import pytest
import torch
from torch import nn

from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.targets.table import translate
from tests.compare import sqnr
from tests.flow import convert
from tests.pt2e.aten.compilers import minilm, resnet18

FORMATS = ["mxfp8(rceil)", "mxfp8_e5m2(rceil)", "mxfp6_e2m3(even)", "mxfp6_e3m2(even)", "mxfp4(even)"]


class Net(nn.Module):
    """A first convolution in float, one with a stride, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 2, 2, bias=False)
        self.up, self.head = nn.Linear(64, 96), nn.Linear(96, 5, bias=False)

    def forward(self, x):  # (B, 3, 8, 8) -> (B, 5)
        y = self.conv(torch.relu(self.stem(x))).mean((2, 3))
        return self.head(torch.relu(self.up(y)))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def quantized(text, model=None, x=X):
    """Return a converted model whose convolution of three channels stays in float."""
    torch.manual_seed(0)
    config = get_default_mx_quantization_config(text, text)
    quantizer = MXQuantizer().set_global(config)
    if model is None:
        quantizer.set_module_name("stem", None)
    return convert((model or Net()).eval(), (x,), quantizer)


@pytest.mark.slow_except("mxfp8(rceil)", "mxfp4(even)")
@pytest.mark.parametrize("text", FORMATS)
def test_gives_the_bits_of_the_converted_model(text):
    model = quantized(text)
    translated = translate(model, "tosa_mxfp")
    called = [str(node.target) for node in translated.graph.nodes if "mx" in str(node.target)]
    assert called == ["tosa_mxfp.conv2d.default"] + ["tosa_mxfp.linear.default"] * 2
    with torch.no_grad():
        assert torch.equal(translated(X), model(X))
        assert torch.equal(torch.export.export(translated, (X,)).module()(X), model(X))


class Shared(nn.Module):
    """A convolution whose result is viewed, and two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(32, 8, 3), nn.Linear(32, 32), nn.Linear(32, 32)
        self.down.weight = self.up.weight

    def forward(self, x):  # (B, 32, 4, 4) -> (B, 32)
        return self.down(torch.relu(self.up(self.conv(x).view(-1, 32))))


def test_a_shared_weight_is_stored_once_and_convolutions_keep_their_layout():
    x = torch.randn(2, 32, 4, 4)
    model = quantized("mxfp8(rceil)", Shared(), x)
    translated = translate(model, "tosa_mxfp")
    assert len([name for name in translated.state_dict() if name.endswith("_qdata")]) == 2
    with torch.no_grad():
        assert torch.equal(translated(x), model(x))


def test_bfloat16():
    """The operators compute in float32, as ExecuTorch's do."""
    x = torch.randn(2, 32, 4, 4, dtype=torch.bfloat16)
    model = quantized("mxfp8(rceil)", Shared().bfloat16(), x)
    with torch.no_grad():
        y, expected = translate(model, "tosa_mxfp")(x), model(x)
    assert y.dtype == torch.bfloat16 and sqnr(y, expected) > 30


class Attention(nn.Module):
    """What TOSA has no operators for: an embedding, and a product of activations in blocks along several dimensions."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(9, 64), nn.Linear(64, 120), nn.Linear(40, 64)

    def forward(self, ids):  # (B, T) -> (B, T, 64)
        q, k, v = self.qkv(self.table(ids)).unflatten(-1, (3, 2, 20)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


IDS = torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(0))
OTHERS = {
    "ragged linear": (nn.Linear(40, 8), torch.randn(2, 3, 40), 1),
    "bfloat16": (nn.Linear(40, 8).bfloat16(), torch.randn(2, 40).bfloat16(), 1),
    "three channels": (nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 5, 5), 1),
    "attention": (Attention(), IDS, 2 + 3),
    "conv1d": (nn.Conv1d(40, 8, 3), torch.randn(2, 40, 9), 1),
    "groups": (nn.Conv2d(64, 8, 3, groups=2), torch.randn(2, 64, 5, 5), 1),
    "unbatched": (nn.Conv2d(32, 8, 3), torch.randn(32, 5, 5), 1),
}


@pytest.mark.slow_cases("*mxfp4*")
@pytest.mark.parametrize("text", ["mxfp8(rceil)", "mxfp4(even)"])
@pytest.mark.parametrize("name", OTHERS)
def test_ragged_blocks_and_other_operators(name, text):
    """Zeros fill blocks. Another operator reads a constant, or the product with the identity matrix."""
    model, x, count = OTHERS[name]
    converted = quantized(text, model, x)
    translated = translate(converted, "tosa_mxfp")
    assert sum("tosa_mxfp" in str(node.target) for node in translated.graph.nodes) == count
    assert not any("pt2mx" in str(node.target) for node in translated.graph.nodes)
    tolerance = 0.02 if x.dtype == torch.bfloat16 else 1e-6
    with torch.no_grad():
        for graph in (translated, torch.export.export(translated, (x,)).module()):
            torch.testing.assert_close(graph(x), converted(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "size"),
    [(7, 2, 3, 1, 10), (3, 2, 1, 1, 8), (1, 2, 0, 1, 8), (3, 4, 1, 1, 8), (2, 3, 1, 3, 9), (3, (2, 1), (0, 1), 2, 10)],
)
def test_strides_leave_no_remainder(kernel, stride, padding, dilation, size):
    """TOSA refuses rows that no window reads: they are sliced off, and the padding is explicit."""
    x = torch.randn(2, 32, size, size + 1)
    model = quantized("mxfp8(rceil)", nn.Conv2d(32, 4, kernel, stride, padding, dilation), x)
    translated = translate(model, "tosa_mxfp")
    with torch.no_grad():
        torch.testing.assert_close(translated(x), model(x), rtol=1e-6, atol=1e-6)
    program = torch.export.export(translated, (x,))
    (node,) = (node for node in program.graph.nodes if "tosa_mxfp" in str(node.target))
    sizes = [node.args[i].meta["val"].shape for i in range(2)]
    for i, (steps, pad, spread) in enumerate(zip(*node.args[4:7], strict=True)):
        assert (sizes[0][2 + i] + 2 * pad - spread * (sizes[1][1 + i] - 1) - 1) % steps == 0


class Product(nn.Module):
    def forward(self, x):  # (B, T, 32) -> (B, 32, 32)
        return x.transpose(1, 2) @ x


def test_refuses_blocks_along_a_dynamic_size():
    x = torch.randn(2, 64, 32)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8(rceil)", "mxfp8(rceil)"))
    model = convert(Product(), (x,), quantizer, shapes=({1: torch.export.Dim("length", max=99)},))
    with pytest.raises(MXError, match=r"along the dynamic size s.*, which tosa_mxfp cannot fill up to whole blocks"):
        translate(model, "tosa_mxfp")


def test_refuses_float16():
    model = quantized("mxfp8(rceil)", nn.Linear(64, 8).half(), torch.ones(2, 64).half())
    with pytest.raises(MXError, match=r"computes in torch.float16, and tosa_mxfp in"):
        translate(model, "tosa_mxfp")


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        ("mxfp8", "mxfp8", "TOSA quantizes fp8_e4m3 by scale_mode rceil"),
        ("mxfp4(rceil)", "mxfp4(rceil)", "TOSA quantizes fp4_e2m1 by scale_mode even"),
        ("mxint8", "mxint8", "has weights of fp4_e2m1, .*fp8_e5m2 with E8M0 scales"),
        ("mxfp8", None, "0.weight is in .*, and the input of '0' is in float: tosa_mxfp multiplies"),
        (
            "mxfp4(even)",
            "mxfp8(rceil)",
            "the input of '0' is in .*rceil.*quantize both so, or leave the module in float",
        ),
    ],
)
def test_what_it_lacks_is_named(weight, activation, message):
    config = get_default_mx_quantization_config(weight, activation)
    model = convert(nn.Sequential(nn.Linear(64, 8)), (torch.randn(2, 64),), MXQuantizer().set_global(config))
    with pytest.raises(MXError, match=message):
        translate(model, "tosa_mxfp")


def in_tosa(model, inputs):
    """Translate a model, and return its result where TOSA's reference model runs all that ExecuTorch gives to TOSA."""
    pytest.importorskip("executorch.backends.arm", reason="needs pip install 'pt2mx[executorch]'", exc_type=ImportError)
    pytest.importorskip("tosa_reference_model", reason="needs pip install tosa-tools")
    from executorch.backends.arm.test.runner_utils import TosaReferenceModelDispatch
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(
        torch.export.export(translate(model, "tosa_mxfp"), inputs),
        partitioner=[TOSAPartitioner(TosaCompileSpec("TOSA-1.1+FP+INT+mxfp"))],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    ).exported_program()
    assert not any("tosa_mxfp" in str(node.target) for node in lowered.graph.nodes)
    with torch.no_grad(), TosaReferenceModelDispatch():
        return lowered.module()(*inputs)


def small_net():
    return Net(), (X,)


def small_resnet18():
    model, (images,) = resnet18()
    return model, (images[:1, :, :64, :64].contiguous(),)


def minilm_of_int32():
    model, inputs = minilm()
    return model, tuple(x.int() for x in inputs)  # TOSA has no int64


#: formats, and the least SQNR in dB: sums in another order move activations to neighbouring codes
WHOLE = [
    (small_net, "mxfp8(rceil)", 100),
    (small_net, "mxfp4(even)", 100),
    (small_resnet18, "mxfp8(rceil)", 100),
    (small_resnet18, "mxfp4(even)", 100),
    (minilm_of_int32, "mxfp8(rceil)", 20),
    (minilm_of_int32, "mxfp4(even)", 20),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "text", "least"), WHOLE)
def test_tosa_computes_the_model(make, text, least):
    model, inputs = make()
    config = get_default_mx_quantization_config(text, text)
    converted = convert(model.eval(), inputs, MXQuantizer().set_global(config))
    with torch.no_grad():
        assert sqnr(in_tosa(converted, inputs), converted(*inputs)) > least
