"""What is installed: a wheel with one top-level package."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pt2mx

ROOT = Path(__file__).parent.parent
LAYERS = {"pt2mx": ROOT / "pt2mx", "pt2mx.fx": ROOT / "fx", "pt2mx.pt2e": ROOT / "pt2e"}


def test_flat_api():
    assert all(hasattr(pt2mx, name) for name in pt2mx.__all__)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE", "pt2mx", "fx", "pt2e", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.compiled
def test_wheel_holds_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pt2mx", f"pt2mx-{wheel.name.split('-')[1]}.dist-info"}
    sources = [
        (root, path) for root in (*LAYERS.items(), ("pt2mx.configs", ROOT / "configs")) for path in root[1].rglob("*")
    ]
    kept = {".py", ".pyi", ".cpp", ".h", ".txt", ".yaml", ".typed", ".html", ".css", ".js"}
    missing = [
        str(path)
        for (package, folder), path in sources
        if path.suffix in kept or path.name == "py.typed"
        if f"{package.replace('.', '/')}/{path.relative_to(folder)}" not in names
    ]
    assert not missing


#: quantizes one layer by a recipe of the wheel
ONE_LAYER = """
import torch
x, quantizer = torch.randn(4, 64), pt2mx.MXQuantizer.from_recipe("mxfp8")
prepared = pt2mx.prepare_pt2e(torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module(), quantizer)
print(pt2mx.quantization_report(pt2mx.convert_pt2e(prepared)).summary)
"""
DEMO = """
from pt2mx.pt2e.cli.demo import main
main(("mxfp8",))
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (ONE_LAYER, ["1 of 1 operators quantized"]),
        pytest.param(DEMO, ["45 of 45 operators quantized", "same bits"], marks=pytest.mark.slow),
    ],
    ids=["one layer", "demo"],
)
@pytest.mark.compiled_cases("one layer")
def test_wheel_installed_elsewhere_runs(program, expected, wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = f"""
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + str(f)]
sys.path.insert(0, {str(target)!r})
import pt2mx, pt2mx.fx, pt2mx.configs
assert pt2mx.__file__.startswith({str(target)!r}) and pt2mx.fx.__file__.startswith({str(target)!r})
{program}"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(text in result.stdout for text in expected)
