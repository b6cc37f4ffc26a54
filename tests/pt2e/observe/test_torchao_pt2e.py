import pytest
import torch
from torch import nn

from pt2mx import MXQuantizer, prepare_pt2e
from tests.models import module_of


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (lambda y: m.bn(y) + y)(m.conv(x)),
        lambda m, x: m.bn2(m.conv(m.bn(m.conv(x)))),
        lambda m, x: m.bn(m.conv(x)) + m.conv(x),
    ],
)
def test_a_batch_norm_whose_producer_is_shared_is_not_folded(use):
    model = module_of(use, conv=nn.Conv2d(4, 4, 1), bn=nn.BatchNorm2d(4), bn2=nn.BatchNorm2d(4)).eval()
    for bn in (model.bn, model.bn2):
        bn.running_var.fill_(4.0)
        bn.running_mean.normal_()
    x = torch.randn(2, 4, 3, 3)
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp8"))(x), model(x), atol=1e-5)


def test_others_are_folded():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval(), torch.randn(2, 4, 3, 3)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), MXQuantizer.from_recipe("mxfp8"))
    assert not prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    assert torch.allclose(prepared(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8, track_running_stats=False)),
        (nn.ConvTranspose2d(4, 8, 2, groups=2), nn.BatchNorm2d(8)),
        (nn.ConvTranspose1d(4, 8, 2, groups=4, bias=False), nn.BatchNorm1d(8)),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 1)), nn.BatchNorm2d(8)),
    ],
)
def test_what_torchao_cannot_fold_stays(layers):
    stays(nn.Sequential(*layers), torch.randn(2, 4, *[3] * (layers[0].weight.dim() - 2)))


class Normalized(nn.Module):
    """A layer, then a batch norm over dimension 1 of its result."""

    def __init__(self, layer, channels, dtype=torch.float32):
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.randn(channels, dtype=dtype))
        self.register_buffer("variance", torch.rand(channels, dtype=dtype) + 0.5)
        self.register_buffer("scale", torch.randn(channels, dtype=dtype))

    def forward(self, x):
        return nn.functional.batch_norm(self.layer(x), self.mean, self.variance, self.scale)


@pytest.mark.parametrize(
    ("layer", "channels", "shape"),
    [
        (nn.Conv1d(4, 8, 1), 8, (4, 8)),  # unbatched: as many positions as channels, so that all shapes fit
        (nn.Conv1d(4, 8, 1), 5, (4, 5)),
        (nn.Conv2d(4, 8, 1), 6, (4, 6, 6)),
        (nn.Conv2d(4, 8, 1), 8, (4, 8, 8)),
        (nn.Conv3d(4, 8, 1), 8, (4, 8, 2, 2)),
        (nn.ConvTranspose1d(4, 8, 1), 8, (4, 8)),
        (nn.ConvTranspose2d(4, 8, 1), 8, (4, 8, 8)),
        (nn.Linear(4, 8), 8, (2, 8, 4)),
        (nn.Linear(4, 8), 3, (2, 3, 4)),
        (nn.Linear(4, 8), 8, (2, 8, 3, 4)),
    ],
    ids=str,
)
def test_what_normalizes_another_dimension_stays(layer, channels, shape):
    stays(Normalized(layer, channels), torch.randn(shape))


def stays(model, x):
    model = model.eval()
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), MXQuantizer.from_recipe("mxfp8"))
    assert torch.allclose(prepared(x), model(x), atol=1e-5)
