import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pt2e import pt2bfp
from tests.compare import same
from tests.flow import exported


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(40, 8), nn.Embedding(9, 40)

    def forward(self, x, *, ids):
        return self.linear(x + self.embedding(ids))


def prepared():
    torch.manual_seed(0)
    spec, dim = pt2bfp.BFPQuantizationSpec("BFP[8|8]{16}(SN)"), torch.export.Dim.DYNAMIC
    quantizer = pt2bfp.BFPQuantizer().set_global(pt2bfp.BFPQuantizationConfig(spec, spec, spec, None))
    shapes = {"x": {0: dim}, "ids": {0: dim}}
    graph = exported(Net().eval(), torch.randn(4, 40), kwargs={"ids": torch.arange(4)}, dynamic_shapes=shapes)
    return pt2bfp.prepare_pt2e(graph, quantizer)


@torch.no_grad()
def test_the_reference_representation_holds_aten_operators_alone():
    model = prepared()
    converted, reference = (pt2bfp.convert_pt2e(model, use_reference_representation=flag) for flag in (False, True))
    assert any("pt2mx" in str(node.target) for node in converted.graph.nodes)
    assert not any("pt2mx" in str(node.target) for node in reference.graph.nodes)
    for rows in (4, 7):  # dynamic as in the export
        x, ids = torch.randn(rows, 40), torch.arange(rows)
        assert same(reference(x, ids=ids), converted(x, ids=ids))
    assert pt2bfp.convert_pt2e(model, False, False).state_dict()["linear.weight"].dtype == torch.float32


@pytest.mark.parametrize("argument", [1, None, "yes"])
def test_bad_arguments(argument):
    with pytest.raises(MXError, match=r"use_reference_representation=.* must be True or False"):
        pt2bfp.convert_pt2e(prepared(), argument)
