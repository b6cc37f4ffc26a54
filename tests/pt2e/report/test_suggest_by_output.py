import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, suggest_config
from pt2mx.pt2e.report.results import Sensitivity, SensitivityRow
from tests.flow import calibrated
from tests.format_candidates import CANDIDATES, CONFIG
from tests.models import module_of


def heads():
    """Two equal layers; the output hides one of them."""
    loud, quiet = nn.Linear(64, 64), nn.Linear(64, 64)
    return module_of(lambda self, x: self.loud(x) + self.quiet(x) / 100, loud=loud, quiet=quiet)


def test_the_objective_is_the_output_of_the_model():
    torch.manual_seed(0)
    model, x = heads().eval(), torch.randn(16, 64)
    exported = torch.export.export(model, (x,)).module()
    prepared = calibrated(exported, MXQuantizer().set_global(CONFIG), x)
    actual = pt2mx.sensitivity(exported, [x], CANDIDATES, metric="noise", operands=["weights"])
    suggested = suggest_config(prepared, 6.25, objective="output", sensitivity=actual)
    chosen = {name: spec["weight"] for name, spec in suggested.to_dict()["module_name"]}
    assert chosen["quiet"] == "mxfp4_e2m1{32}" and chosen["loud"] in ("mxfp8_e4m3{32}", "int8{32}", "mxint8{32}")
    with pytest.raises(MXError, match="objective='model' is unknown"):
        suggest_config(prepared, 6.25, objective="model")
    with pytest.raises(MXError, match="go together"):
        suggest_config(prepared, 6.25, objective="output")
    with pytest.raises(MXError, match="go together"):
        suggest_config(prepared, 6.25, sensitivity=actual)
    local = pt2mx.sensitivity(exported, [x], {"mine": MXQuantizationConfig(weight="mxfp4")}, metric="noise")
    with pytest.raises(MXError, match="the sensitivity has the candidate 'mine', which is no format"):
        suggest_config(prepared, 6.25, objective="output", sensitivity=local)
    fewer = pt2mx.sensitivity(exported, [x], ["mxfp4"], metric="noise")
    with pytest.raises(MXError, match="the sensitivity has nothing of the weights of 'loud' in mxfp6"):
        suggest_config(prepared, 6.25, objective="output", sensitivity=fewer)


def test_a_cost_that_is_infinite_is_avoided():
    torch.manual_seed(0)
    exported = torch.export.export(heads().eval(), (torch.randn(16, 64),)).module()
    prepared = calibrated(exported, MXQuantizer().set_global(CONFIG), torch.randn(16, 64))
    costs = {"mxfp4": math.inf, "mxfp6": 0.5, "mxfp8": 0.25, "mxint8": 0.25}
    rows = [SensitivityRow(name, one, "weights", cost) for name in ("loud", "quiet") for one, cost in costs.items()]
    actual = Sensitivity("kl", tuple(rows), {})
    for bits, spec in ((6.25, "mxfp6_e2m3{32}"), (4.25, "mxfp4_e2m1{32}")):  # 6.25 bits are FP4 and FP8, too
        suggested = suggest_config(prepared, bits, objective="output", sensitivity=actual)
        assert {config["weight"] for _, config in suggested.to_dict()["module_name"]} == {spec}
