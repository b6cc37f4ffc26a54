import re
import warnings
from pathlib import Path

import pytest
import torch

from pt2mx.kernels.cpu import build, linear
from pt2mx.pt2e.cli import doctor_checks
from pt2mx.pt2e.cli.doctor_checks import CHECKS, EXTRAS, NotNeeded

PROJECT = (Path(__file__).parents[3] / "pyproject.toml").read_text()
LOOK = {check.name: check.look for checks in CHECKS.values() for check in checks}


def listed(name):
    """Return the strings of a list in pyproject.toml, which Python 3.10 cannot parse."""
    return re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*?)\]$", PROJECT, re.MULTILINE | re.DOTALL)[1])


def test_the_checks_are_the_dependencies():
    needed = {check.name: check.repair for check in CHECKS["packages"][1:]}
    assert list(needed.values()) == [f"pip install '{requirement}'" for requirement in listed("dependencies")]
    assert all(check.needed for check in CHECKS["packages"]) and not any(c.needed for c in CHECKS["extras"])


def test_the_extras_are_those_of_the_project():
    section = PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(EXTRAS) == set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) - {"dev", "docs", "tensorflow", "eval"}
    for name, packages in EXTRAS.items():
        required = [one.partition(">=")[0] for one in listed(name) if not one.startswith("pt2mx")]
        assert required == list(packages)


def test_an_old_version():
    assert doctor_checks._package("numpy", "1.0").count(".") >= 1
    with pytest.raises(RuntimeError, match=r"is older than 99\.1"):
        doctor_checks._package("numpy", "99.1")
    assert doctor_checks._package("numpy", "1.0", "99.1") == doctor_checks._package("numpy")
    assert doctor_checks._package("numpy", "1.0", "1.1").endswith(
        ", newer than 1.1, the newest that pt2mx was tested with"
    )


@pytest.mark.parametrize(("version", "least", "older"), [("2.9.1+cpu", "2.11", True), ("2.13.0+cpu", "2.11", False)])
def test_versions_are_numbers(version, least, older):
    assert (doctor_checks._numbers(version) < doctor_checks._numbers(least)) == older


def test_the_kernels(monkeypatch):
    built = f"built for {torch.backends.cpu.get_cpu_capability()}, "
    assert LOOK["CPU kernels"]().startswith(built)
    for units, names in ((0, ""), (1, "AMX"), (6, "8-bit integers, AVX512_BF16")):
        monkeypatch.setattr(linear, "isa_for", lambda spec, k, units=units: units)
        matmuls = f"matmuls of quantized activations on {names}, " if names else ""
        assert LOOK["CPU kernels"]().startswith(
            f"{built}{matmuls}{torch.get_num_threads()} threads, {build.load()[0]._name}"
        )

    def unbuilt():
        warnings.warn("no compiler: g++ failed", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(build, "load", unbuilt)
    with pytest.raises(RuntimeWarning, match=r"g\+\+ failed"):
        LOOK["CPU kernels"]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor_checks.os.path, "exists", lambda path: False)
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    for name in ("GPU", "Triton"):
        with pytest.raises(NotNeeded):
            LOOK[name]()
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: "/bin/nvidia-smi")
    with pytest.raises(RuntimeError, match=r"has an NVIDIA driver, and torch .* finds no GPU"):
        LOOK["GPU"]()
