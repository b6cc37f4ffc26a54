"""OpenVINO and ExecuTorch run what transformers' exporters write.

The packages are large: these tests are slow, and run in an environment that has them: the one whose python
PT2MX_HOSTS_PYTHON names, or one that is made for them."""

import pytest

from tests.documents import ROOT, blocks
from tests.environments import python_with, run_python

PAGE = ROOT / "pt2e" / "exporters" / "README.md"
PACKAGES = ("openvino", "executorch")

PROGRAM = """
import sys
import openvino
import torch
from transformers import exporters
import pt2mx
import pt2mx.pt2e.exporters.quantizer as quantizer
from tests.pt2e.exporters.models import MODELS, example
from tests.compare import sqnr

# processors that multiply bfloat16 faster would round float32 to it
compile_model = openvino.Core.compile_model
openvino.Core.compile_model = lambda core, model, device, config: compile_model(
    core, model, device, {**config, "INFERENCE_PRECISION_HINT": "f32"}
)
convert, models = pt2mx.convert_pt2e, []
quantizer.convert_pt2e = lambda prepared: models.append(convert(prepared)) or models[-1]
host, *cases = sys.argv[1:]
exporter, config = {
    "openvino": (exporters.OpenVINOExporter, exporters.OpenVINOConfig),
    "executorch": (exporters.ExecutorchExporter, exporters.ExecutorchConfig),
}[host]
for case in cases:
    name, recipe = case.split(":")
    inputs = example(name)
    quantize = pt2mx.MXExportQuantizer(recipe, [example(name, 1)])
    exported = exporter().export(MODELS[name](), dict(inputs), config(quantizer=quantize))
    first = lambda output: next(v for v in output.values() if isinstance(v, torch.Tensor))
    with torch.no_grad():
        print(case, sqnr(first(exported(**inputs)), first(models[-1](**inputs))), flush=True)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The python of an environment with the packages of the hosts."""
    return python_with(PACKAGES, "PT2MX_HOSTS_PYTHON", tmp_path_factory.mktemp("hosts"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "cases"),
    [
        ("openvino", ["resnet:mxfp4_weight_only", "bert:mxint8", "vit:mxfp8", "llama:mxfp4_weight_only", "bert:mxfp6"]),
        ("openvino", [f"{name}:mxfp4_weight_only" for name in ("minilm", "resnet18", "vit_base")]),
        ("executorch", [f"{name}:mxfp4_weight_only" for name in ("resnet", "bert", "vit", "llama", "resnet18")]),
        ("executorch", ["minilm:mxfp4_weight_only", "vit_base:mxfp4_weight_only"]),
        ("executorch", ["resnet:mxfp8"]),
    ],
)
def test_the_runner_gives_the_outputs_of_the_converted_model(host, cases, python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    printed = run_python(python, "program.py", host, *cases, cwd=tmp_path).splitlines()
    ratios = dict(line.split() for line in printed if line.split()[0] in cases)
    assert list(ratios) == cases
    for case, ratio in ratios.items():
        assert float(ratio) >= (100 if case.endswith("weight_only") else 40), printed


@pytest.mark.slow
def test_the_code_of_the_page_runs(python, tmp_path):
    ((_, _, code),) = [block for block in blocks(PAGE, "python") if block[1] == "openvino"]
    (tmp_path / "page.py").write_text(code)
    run_python(python, "page.py", cwd=tmp_path)
