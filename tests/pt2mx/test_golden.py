"""What peer libraries gave for the same inputs; `golden.npz` holds a manifest that says where they follow the
specification."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pt2mx import FORMATS, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.modes import ROUNDINGS, SCALE_MODES

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def entries():
    """The entries that follow the specification with a scale mode and rounding of ours: without those whose own terms
    differ (int8 down to -128, fp32 subnormals flushed, exponents by division)."""
    manifest = json.loads(bytes(GOLDEN["manifest_json"]))
    for entry in manifest["entries"]:
        oracle = entry.get("oracle", {})
        if (
            entry["expect"] == "exact"
            and "dq" in entry
            and entry["round"] in ROUNDINGS
            and entry["scale_mode"] in SCALE_MODES
            and oracle.get("scale_mode") != "rceil_div_log2"
            and "int8_min" not in oracle
            and not entry.get("flush")
        ):
            yield entry


CASES = sorted({(e["lib"], e["fmt"]) for e in entries()})


@pytest.mark.parametrize(("lib", "fmt"), CASES)
def test_equals_the_peer_where_it_follows_the_specification(lib, fmt):
    checked = 0
    for entry in entries():
        if (entry["lib"], entry["fmt"]) != (lib, fmt):
            continue
        x, want = torch.from_numpy(GOLDEN["in/" + entry["input"]]), GOLDEN[entry["dq"]]
        x = x.to(DTYPES[entry["in_dtype"]])
        axis = entry["axis"]
        if lib == "pychop":  # its blocks run over the flattened tensor
            x, axis = x.reshape(-1), 0
        modes = (fmt, entry["block"], axis, entry["scale_mode"])
        scale, data = quantize_mx(x, *modes)
        length = x.shape[axis]
        got = dequantize_mx(data, scale, fmt, entry["block"], DTYPES[entry["out_dtype"]], axis, length)
        np.testing.assert_array_equal(got.float().numpy().reshape(want.shape), want, err_msg=str(entry))
        if entry["out_dtype"] == entry["in_dtype"]:
            assert torch.equal(_bits(fake_quantize_mx(x, *modes)), _bits(got)), entry
        checked += 1
    assert checked


def test_most_of_the_record_is_checked():
    checked = list(entries())
    assert len(checked) == 1398
    assert {e["fmt"] for e in checked} == set(FORMATS)
    assert {e["scale_mode"] for e in checked} == {"floor", "ceil", "rceil", "even"}


def _bits(x):
    x = torch.where(x.isnan(), torch.zeros((), dtype=x.dtype), x)
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
