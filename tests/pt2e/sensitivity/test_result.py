import json
import math

import pytest

from pt2mx import MXError
from pt2mx.pt2e.sensitivity.result import Sensitivity, SensitivityRow


def test_result(tmp_path):
    rows = [SensitivityRow(name, "mxfp4", "both", alone, math.nan, estimate) for name, alone, estimate in (
        ("a", 3.0, 2.0), ("b", 2.0, 3.0), ("c", 1.0, 0.5))]  # fmt: skip
    found = Sensitivity("kl", tuple(rows), {"mxfp4": 7.0})
    assert math.isclose(found.agreement("mxfp4"), 0.5, abs_tol=1e-6)
    assert math.isnan(found.agreement("mxfp4", "weights")) and found.of("mxfp4", "weights") == {}
    with pytest.raises(MXError, match="candidate='mxfp5' was not measured: did you mean 'mxfp4'"):
        found.agreement("mxfp5")
    with pytest.raises(MXError, match="operands='weight' is unknown: did you mean 'weights'"):
        found.of("mxfp4", "weight")
    with pytest.raises(MXError, match="worst='all' must be a number of rows, or None for all"):
        found.to_table("all")
    assert json.loads(found.to_json(tmp_path / "s.json"))["rows"][0]["module"] == "a"
    assert json.loads((tmp_path / "s.json").read_text())["whole"] == {"mxfp4": 7.0}
    _, row, whole = found.to_table(1).splitlines()
    assert row.split() == ["a", "mxfp4", "both", "3", "2"] and whole == "mxfp4, everything: 7"
