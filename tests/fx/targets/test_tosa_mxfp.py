"""The target `tosa_mxfp`; ExecuTorch's Arm backend and TOSA's reference model where they are installed."""

import pytest
import torch
from torch import nn

from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.targets.table import translate
from tests.compare import sqnr
from tests.flow import convert

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


@pytest.mark.parametrize(
    ("model", "x", "text", "message"),
    [
        (nn.Linear(64, 8), torch.randn(2, 64), "mxfp8", "TOSA quantizes fp8_e4m3 by scale_mode rceil"),
        (nn.Linear(64, 8), torch.randn(2, 64), "mxfp4(rceil)", "TOSA quantizes fp4_e2m1 by scale_mode even"),
        (nn.Linear(64, 8), torch.randn(2, 64), "mxint8", "has weights of fp4_e2m1, .*fp8_e5m2 with E8M0 scales"),
        (
            nn.Linear(64, 8).half(),
            torch.ones(2, 64).half(),
            "mxfp8(rceil)",
            "computes in torch.float16, and tosa_mxfp in",
        ),
        (nn.Linear(40, 8), torch.randn(2, 40), "mxfp8(rceil)", "40 is no multiple of 32"),
        (nn.Sequential(nn.Embedding(9, 64)), torch.tensor([1]), "mxfp8(rceil)", "aten.embedding.default of '0' reads"),
        (nn.Sequential(nn.Conv1d(32, 8, 1)), torch.randn(1, 32, 9), "mxfp8(rceil)", "aten.conv1d.default of '0' reads"),
    ],
)
def test_what_it_lacks_is_named(model, x, text, message):
    with pytest.raises(MXError, match=message):
        translate(quantized(text, model, x), "tosa_mxfp")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", ["mxfp8(rceil)", "mxfp4(even)"])
def test_tosa_computes_the_model(text, tmp_path):
    """One file of TOSA, in its reference model."""
    pytest.importorskip("executorch.backends.arm", reason="needs pip install 'pt2mx[executorch]'", exc_type=ImportError)
    reference_model = pytest.importorskip("tosa_reference_model", reason="needs pip install tosa-tools")
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    model = quantized(text)
    spec = TosaCompileSpec("TOSA-1.1+FP+mxfp").dump_intermediate_artifacts_to(str(tmp_path))
    to_edge_transform_and_lower(
        torch.export.export(translate(model, "tosa_mxfp"), (X,)),
        partitioner=[TOSAPartitioner(spec)],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    (file,) = tmp_path.glob("*.tosa")
    (y,), status = reference_model.run(file.read_bytes(), [X.numpy()])
    assert status == reference_model.GraphStatus.TOSA_VALID
    with torch.no_grad():
        assert sqnr(torch.from_numpy(y), model(X)) > 100
