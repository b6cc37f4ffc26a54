"""Graph passes on every device, where `pt2mx.kernels.select.USES` lists the devices that have their kernels."""

import pytest

from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.kernels.select import USES

_USES = (
    "attend to new tokens",
    "attend to codes of new tokens",
    "count programs of attention",
    "multiply FP8 rows",
    "multiply MX on tensor cores",
    "multiply weights in the MMA layout",
    "multiply x and weights rounded to bfloat16",
)


def everywhere(graph_pass: GraphPass) -> GraphPass:
    """Return a pass that does on each device what it does where there are kernels of its operators."""

    def edit(model):
        with pytest.MonkeyPatch.context() as patch:
            for use in _USES:
                patch.setitem(USES, use, {"cpu": "", "cuda": ""})
            graph_pass(model)

    return GraphPass(edit)
