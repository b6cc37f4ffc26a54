import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.kernels.cpu import uses
from pt2mx.kernels.cpu.linear import AVX512_BF16
from pt2mx.ops.convolution import conv2d_mx
from pt2mx.ops.hadamard import rotated_fake_quantize_mx
from pt2mx.ops.quantize_epilogue import conv2d_fake_quantize_mx
from tests.compare import relative_error
from tests.flow import convert
from tests.graph import count
from tests.models import module_of

aten = torch.ops.aten
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def bfloat16_instructions(monkeypatch):
    """Run the pass on every machine: a dense matmul replaces the kernel without bfloat16 instructions."""
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: 0 if spec.block_size % 32 else AVX512_BF16)


def lowered(model, x, name="mxfp8", shapes=None):
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(name, name))
    converted = convert(model, (x,), quantizer, shapes=shapes)
    return converted, lower_to_inductor(converted)


@pytest.mark.diagonal
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, {"padding": 1}),
        (3, {}),
        (3, {"stride": 2, "padding": 1}),
        ((1, 5), {"padding": (0, 2), "stride": (2, 1)}),
        (1, {}),
        (1, {"stride": 2}),
        (1, {"stride": (1, 3), "padding": 1}),
        (7, {"padding": 3, "stride": 4}),
        (3, {"dilation": (1, 2), "padding": (0, 2)}),
    ],
)
def test_kernels(kernel, options, bias):
    torch.manual_seed(0)
    model, x = nn.Conv2d(64, 40, kernel, bias=bias, **options), torch.randn(2, 64, 9, 11)
    converted, found = lowered(model, x)
    assert count(found, conv2d_mx) == 1 and not count(found, aten.conv2d.default)
    torch.testing.assert_close(found(x), converted(x), **CLOSE)
    assert found(x).stride() == converted(x).stride()
    held = {name: t.shape for name, t in found.state_dict().items() if t.dtype == torch.uint8}
    assert held == {"weight_data_rows": (40, *model.kernel_size, 64), "weight_scale_rows": (40, *model.kernel_size, 2)}


def test_a_weight_of_several_convolutions_is_held_once():
    x = torch.randn(2, 64, 9, 11)
    twice = module_of(lambda self, x: self.conv(torch.sin(self.conv(x))), conv=nn.Conv2d(64, 64, 3, padding=1))
    converted, found = lowered(twice, x)
    assert count(found, conv2d_mx) == 2
    assert [name for name, t in found.state_dict().items() if t.dtype == torch.uint8] == [
        "conv.weight_data_rows",
        "conv.weight_scale_rows",
    ]
    torch.testing.assert_close(found(x), converted(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"padding": 2}, {"stride": 3, "dilation": 2, "bias": False}])
def test_one_dimension(options):
    model, x = nn.Conv1d(32, 20, 5, **options), torch.randn(3, 32, 40)
    converted, found = lowered(model, x)
    assert count(found, conv2d_mx) == 1 and not count(found, aten.conv1d.default)
    torch.testing.assert_close(found(x), converted(x), **CLOSE)
    assert found(x).stride() == converted(x).stride()
    assert found.state_dict()["weight_data_rows"].shape == (20, 1, 5, 32)


@pytest.mark.diagonal
@pytest.mark.parametrize("channels", [1, 3, 20])
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "dilation": (2, 1), "bias": False}])
def test_few_channels(channels, options):
    torch.manual_seed(0)
    for kind, x, kernel in (
        (nn.Conv2d, torch.randn(2, channels, 19, 21), 8),
        (nn.Conv1d, torch.randn(2, channels, 90), 64),
    ):
        given = {key: value if kind is nn.Conv2d or key != "dilation" else 1 for key, value in options.items()}
        model = kind(channels, 40, kernel, **given)
        converted, found = lowered(model, x)
        assert count(found, conv2d_mx) == 1
        torch.testing.assert_close(found(x), converted(x), **CLOSE)
        assert found(x).stride() == converted(x).stride()


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["mxint8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxfp8_e5m2{64}", "mxfp8{128}"])
@pytest.mark.parametrize("channels", [64, 50])
def test_formats(name, channels):
    """The last format has longer blocks than channels; the channels are no whole groups."""
    model, x = nn.Conv2d(channels, 32, 3, padding=1), torch.randn(1, channels, 6, 6)
    converted, found = lowered(model, x, name)
    assert count(found, conv2d_mx) == 1
    torch.testing.assert_close(found(x), converted(x), **CLOSE)


def test_bfloat16():
    model, x = nn.Conv2d(64, 32, 3).bfloat16(), torch.randn(2, 64, 8, 8).bfloat16()
    converted, found = lowered(model, x, "mxint8")
    assert count(found, conv2d_mx) == 1 and found(x).dtype == torch.bfloat16
    assert relative_error(found(x), converted(x).double()) < 1e-2


def test_a_quantization_is_shared():
    both = module_of(
        lambda self, x: self.first(x) + self.second(x),
        first=nn.Conv2d(32, 32, 3, padding=1),
        second=nn.Conv2d(32, 32, 1),
    )
    model, x = both, torch.randn(2, 32, 8, 8)
    converted, found = lowered(model, x)
    assert count(found, conv2d_mx) == 2 and count(found, rotated_fake_quantize_mx) == 1
    torch.testing.assert_close(found(x), converted(x), **CLOSE)


@pytest.mark.parametrize(
    ("model", "channels"),
    [
        (nn.Conv2d(3, 32, 3), 3),
        (nn.Conv2d(3, 32, 7).bfloat16(), 3),
        (nn.Conv2d(3, 32, 5, dilation=(1, 2)), 3),
        (nn.Conv2d(40, 32, 3), 40),
        (nn.Conv2d(64, 64, 3, groups=2), 64),
        (nn.Conv2d(64, 64, 3, padding="same"), 64),
        (nn.Conv2d(64, 64, 3).half(), 64),
        (nn.ConvTranspose2d(64, 64, 3), 64),
    ],
)
def test_others_stay(model, channels):
    x = torch.randn(2, channels, 9, 9, dtype=model.weight.dtype)
    converted, found = lowered(model, x)
    assert not count(found, conv2d_mx)
    assert torch.equal(found(x), converted(x))


def test_weights_alone_stay():
    x = torch.randn(2, 64, 8, 8)
    converted = convert(nn.Conv2d(64, 64, 3), (x,), "mxfp4_weight_only")
    assert not count(lower_to_inductor(converted), conv2d_mx)


class Views(nn.Module):
    """Reads results of convolutions through views that depend on the memory order, and adds to one in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 32, 1)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        y = torch.relu_(self.first(x))
        z = self.second(y).add_(x)
        rows = z.view(z.shape[0], 32, -1)
        return self.head(rows.mean(2)), rows, z, y.transpose(1, 2)


@pytest.mark.compiled
def test_views_behind(tmp_path):
    model, x = Views(), torch.randn(2, 32, 6, 5)
    batch = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    converted, found = lowered(model, x, shapes=(batch,))
    assert count(found, conv2d_mx) == count(found, conv2d_fake_quantize_mx) == 1 and not count(
        found, aten.conv2d.default
    )
    program = torch.export.export(found, (x,), dynamic_shapes=(batch,))
    torch.export.save(program, tmp_path / "views.pt2")
    again, portable = torch.export.load(tmp_path / "views.pt2").module(), pt2mx.make_portable(program).module()
    for given in (x, torch.randn(3, 32, 9, 5)):
        want = converted(given)
        for each in (found, again, portable):
            torch.testing.assert_close(each(given), want, **CLOSE)
        assert [t.stride() for t in found(given)] == [t.stride() for t in want]


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_compiled():
    model, x = Views(), torch.randn(2, 32, 6, 5)
    converted, found = lowered(model, x, "mxint8")
    with torch.no_grad():
        for got, want in zip(torch.compile(found, fullgraph=True)(x), converted(x), strict=True):
            assert relative_error(got, want.double()) < 1e-3 and got.stride() == want.stride()


def test_memory_that_another_order_would_misread_stays():
    x = torch.randn(1, 32, 5, 5)
    strided = module_of(lambda self, x: torch.relu(self.conv(x)).as_strided((4,), (1,)), conv=nn.Conv2d(32, 32, 3))
    converted, found = lowered(strided, x)
    assert not count(found, conv2d_mx) and torch.equal(found(x), converted(x))


def test_channels_last():
    model, x = nn.Conv2d(64, 32, 3), torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last)
    converted, found = lowered(model, x)
    assert count(found, conv2d_mx) == 1
    torch.testing.assert_close(found(x), converted(x), **CLOSE)
    assert found(x).stride() == converted(x).stride()


def test_the_quantization_is_of_values_along_channels():
    model, x = nn.Conv2d(64, 32, 1, bias=False), torch.randn(1, 64, 3, 3)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.weight[:, :, 0, 0].fill_diagonal_(1.0)
    _, found = lowered(model, x, "mxfp4")
    assert torch.equal(found(x), ops.fake_quantize_mx(x, "fp4_e2m1", 32, 1, "floor", "even", None, "identity")[:, :32])


# ---- graphs that write the results or the inputs of convolutions ----


def first_channels(y):
    y[:, :2] = 5.0
    return y


def whole_view(y):
    y.view(-1).mul_(2)
    return y


def flat(y):
    y.flatten(1).mul_(2.0)
    return y.sum((2, 3))


def reshaped(y):
    y.reshape(len(y), -1)[:, 0] = 100.0
    return y.sum((2, 3))


def through_another(y):
    other = torch.zeros_like(y)
    other.copy_(y)
    other.view(-1)[3] = 2.0
    return other


def copied(y):
    """Write to a copy; with the channels last this would be a view."""
    rows = y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])
    rows.mul_(2.0)
    return y.sum((2, 3))


def written_behind_a_copy(y):
    rows = y.permute(0, 2, 3, 1).reshape(-1, y.shape[1])
    y.mul_(2.0)
    return rows


@pytest.mark.parametrize(
    "write", [first_channels, whole_view, flat, reshaped, through_another, copied, written_behind_a_copy]
)
def test_results_that_are_written(write):
    """A view through which a graph writes stays a view, and an output has its last value."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 5, 5)
    net = module_of(lambda self, x: write(self.convolution(x)), convolution=nn.Conv2d(64, 64, 3, padding=1))
    converted, low = lowered(net, x, "mxint8")
    assert count(low, conv2d_mx) == (write is first_channels)
    torch.testing.assert_close(low(x), converted(x), **CLOSE)


def test_dropout_in_place_that_does_nothing():
    """As in front of EfficientNet's classifier."""
    model = nn.Sequential(
        nn.Conv2d(32, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(64, 8)
    )
    x = torch.randn(2, 32, 5, 5)
    converted, low = lowered(model.eval(), x)
    assert count(low, conv2d_mx) == 1
    torch.testing.assert_close(low(x), converted(x), **CLOSE)


def test_an_input_that_is_written_after_it_is_quantized():
    def forward(self, x):
        doubled = x * 2
        quantized = ops.fake_quantize_mx(doubled, "int8", 32, 1, "floor", "even", None, "identity")
        doubled.zero_()
        return self.convolution(quantized)

    x = torch.randn(2, 64, 5, 5)
    converted = convert(module_of(forward, convolution=nn.Conv2d(64, 64, 3, padding=1)), (x,), "mxfp4_weight_only")
    low = lower_to_inductor(converted)
    assert count(low, conv2d_mx) == 1
    torch.testing.assert_close(low(x), converted(x), **CLOSE)
