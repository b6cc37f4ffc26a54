"""What ran in vLLM (`results.json`) against what pt2mx says of the same checkpoints, and how they are scored."""

import copy
import enum
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from tests.engines.vllm import __main__ as command
from tests.engines.vllm.cases import CASES, write
from tests.engines.vllm.decode import decoded
from tests.engines.vllm.engine import kernels, result_file
from tests.engines.vllm.expectations import refusals
from tests.engines.vllm.models import SMOLLM2, write_float_model
from tests.float_checkpoints import of_weights

_RESULTS = json.loads(command.RESULTS.read_text())
_BY_NAME = {case.name: case for case in CASES}
_RAN = [row for row in _RESULTS["rows"] if row["model"] != SMOLLM2]


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    return tmp_path_factory.mktemp("float")


@pytest.mark.slow_except("qwen2-compressed*mxfp8*", "gpt_oss-modelopt-nvfp4-mse", "gpt_oss-modelopt*lm_head")
@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in _RAN])
def test_pt2mx_says_what_happened(row, floats, tmp_path):
    """So does `expectations.py`, which has none of vLLM."""
    case = _BY_NAME[row["name"]]
    write_float_model(case.model, floats / case.model, None)
    said = write(case, floats / case.model, tmp_path / "out")
    assert said.split(" ")[0] == ("loads" if row["loads"] else "does"), (said, row)
    assert (refusals(tmp_path / "out") == []) == row["loads"]


def _rounds_inputs(row):
    """Quark is emulated with the inputs of the checkpoint; Cutlass rounds them whatever it says."""
    return "Cutlass" in row["kernels"][0] or (row["layout"] == "quark" and "inputs" in row["what"])


def test_values_are_right_where_it_loads():
    """As near to float32 as bfloat16 is. Where it rounds inputs, it is farther."""
    for row in _RESULTS["rows"]:
        if row["loads"] and not _rounds_inputs(row):
            assert row["distance"] < 1.25 * row["of_bfloat16"], row["name"]


def test_names_are_of_one_case():
    assert len(_BY_NAME) == len(CASES) and {row["name"] for row in _RESULTS["rows"]} <= _BY_NAME.keys()


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("compressed-tensors", "mxfp4(even)"),
        ("compressed-tensors", "mxfp8(rceil)"),
        ("quark", "mxfp6(even)"),
        ("fp8", "fp8_e4m3{128x128}"),
    ],
)
def test_values_of_a_checkpoint(layout, text, floats, tmp_path):
    write_float_model("llama", floats / "llama", None)
    convert_checkpoint(floats / "llama", tmp_path / "out", of_weights(text), layout=layout)
    name = "model.layers.1.mlp.down_proj.weight"
    values, weights = decoded(tmp_path / "out"), decoded(floats / "llama")
    assert torch.equal(values[name], pt2mx.fake_quantize_mx(weights[name], text))
    assert values.keys() == weights.keys()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_values_of_scales_with_a_tensor_scale(layout, floats, tmp_path):
    write_float_model("llama", floats / "llama", None)
    convert_checkpoint(floats / "llama", tmp_path / "mx", of_weights("mxfp4(even)"))
    convert_checkpoint(tmp_path / "mx", tmp_path / "nv", layout=layout, weights="nvfp4")
    expected, values = decoded(tmp_path / "mx"), decoded(tmp_path / "nv")
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_values_of_experts(floats, tmp_path):
    write_float_model("gpt_oss", floats / "gpt_oss", None)
    convert_checkpoint(floats / "gpt_oss", tmp_path / "out", of_weights("mxfp4(even)"), layout="mxfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj"  # (E, K, N)
    expected = pt2mx.fake_quantize_mx(
        decoded(floats / "gpt_oss")[name], pt2mx.MXSpec("mxfp4", axis=1, scale_mode="even")
    )
    assert torch.equal(decoded(tmp_path / "out")[name], expected)


def test_kernels_of_a_model():
    class MarlinLinearKernel:
        pass

    layers = nn.ModuleList(nn.Identity() for _ in range(3))
    layers[0].scheme = SimpleNamespace(kernel=MarlinLinearKernel())
    layers[1].quant_method = SimpleNamespace(mxfp4_backend=enum.Enum("Backend", "TRITON").TRITON, emulate=False)
    layers[2].scheme = SimpleNamespace(emulate=True)
    assert kernels(layers) == ["Marlin", "emulated", "experts TRITON"]


def test_a_process_that_ends_is_a_result(tmp_path, monkeypatch):
    """The others run in a process of their own."""
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()

    def run(arguments, check):
        assert arguments[:2] == [sys.executable, "-m"]
        for folder in arguments[4:]:
            if folder.endswith("b"):
                return subprocess.CompletedProcess(arguments, -11)
            (tmp_path / folder / "vllm-2.json").write_text('{"loads": true}')
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    command.run(places, 2)
    results = [json.loads(result_file(place, 2).read_text()) for place in places]
    assert results[1] == {"loads": False, "reason": "its process ends with status -11"}
    assert results[0] == results[2] == {"loads": True}


def test_other_rows_stay(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(_RESULTS))
    again = {**_RESULTS["rows"][0], "distance": 0.5}
    results = command.merged(path, {**_RESULTS, "rows": [again]})
    assert [row["name"] for row in results["rows"]] == [row["name"] for row in _RESULTS["rows"]]
    assert sum(row.get("distance") == 0.5 for row in results["rows"]) == 1
    newer = copy.deepcopy({**_RESULTS, "date": "2027-01-01", "rows": [again]})
    assert command.merged(path, newer) == newer


def test_the_table_is_that_of_the_results():
    assert command.TABLE.read_text() == command.table(_RESULTS)
