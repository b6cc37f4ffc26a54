import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.fx.graph.origins import by_origin, origin

X = torch.randn(2, 32, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution whose batch norm is folded, and an operator with several outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.gru = nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.GRU(36, 8, batch_first=True)

    def forward(self, x):
        return self.gru(self.norm(self.conv(x)).flatten(2))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.gru._flat_weights")  # export's
def test_what_was_folded_and_items_of_tuples_are_found_in_each_form():
    exported = torch.export.export(Net().eval(), (X,)).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8")))
    again = torch.export.export(torch.export.export(converted, (X,)).module(), (X,)).module()
    assert {"conv2d", "batch_norm", "gru", "gru[0]", "gru[1]"} <= by_origin(exported.graph).keys()
    for form in (converted, again):
        found = by_origin(form.graph)
        assert {"batch_norm", "gru[0]", "gru[1]"} <= found.keys() and "conv2d" not in found
        assert found["batch_norm"].target is torch.ops.aten.conv2d.default
        assert [origin(node) for node in form.graph.output_node().all_input_nodes] == ["gru[0]", "gru[1]"]
