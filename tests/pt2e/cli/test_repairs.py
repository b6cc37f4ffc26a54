import pytest

from pt2mx.pt2e.cli import repairs

SCHEMA = "RuntimeError: operator torchvision::nms does not exist"
CPU, GPU = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu130"


@pytest.mark.parametrize(
    ("torch", "torchvision", "requirement", "command"),
    [
        ("2.13.0+cpu", "0.28.0", "torch (==2.13.0)", f"--no-deps torchvision==0.28.0 --index-url {CPU}"),
        ("2.13.0+cu130", "0.28.0+cpu", "torch==2.13.0", f"--no-deps torchvision==0.28.0 --index-url {GPU}"),
        ("2.13.0", "0.28.0", "torch==2.13.0", "--no-deps torchvision==0.28.0"),
        ("2.14.1", "0.28.0", "torch==2.13.0", "torchvision torch==2.14.1"),
        ("2.14.1+cpu", "0.28.0", "torch==2.13.0", f"torchvision torch==2.14.1 --index-url {CPU}"),
    ],
)
def test_torchvision_of_the_version_and_build_of_torch(torch, torchvision, requirement, command, monkeypatch):
    monkeypatch.setattr(repairs.metadata, "version", {"torch": torch, "torchvision": torchvision}.get)
    monkeypatch.setattr(repairs.metadata, "requires", {"torchvision": ["numpy", requirement]}.get)
    assert repairs.repair("torchvision", "ImportError: libx.so") == f"pip install --force-reinstall {command}"
    assert repairs.repair("transformers", SCHEMA) == f"pip install --force-reinstall {command}"


def test_another_package_is_installed_anew():
    assert repairs.repair("onnxruntime", "ImportError: libx.so") == "pip install --force-reinstall onnxruntime"
