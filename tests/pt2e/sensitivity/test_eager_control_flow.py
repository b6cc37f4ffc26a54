import pytest
import torch

from pt2mx import MXError, sensitivity
from pt2mx.pt2e.sensitivity import estimate
from tests.subgraph_models import MODELS, Cond, X


@pytest.mark.compiled_cases("WhileLoop", "NoGrad")
@pytest.mark.slow_cases("Nested", "Scan", "Map")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_estimates_inside_of_graphs(make):
    with torch.no_grad():
        exported = torch.export.export(make().eval(), (X,)).module()
    options = {"metric": "noise", "method": "both", "draws": 64}
    rows = sensitivity(exported, [X, -X], ["mxfp8"], **options).rows
    assert len(rows) == 2  # the layer in the subgraph, and the one around it
    for row in rows:
        assert 0.75 < row.estimate / row.alone < 1.33, row


def test_an_operator_without_gradients_is_refused(monkeypatch):
    monkeypatch.delitem(estimate._RUN, "cond")
    exported = torch.export.export(Cond().eval(), (X,)).module()
    with pytest.raises(MXError, match=r"no gradients pass through cond: give method='forward'"):
        sensitivity(exported, [X], ["mxfp8"], method="gradient", metric="noise")
