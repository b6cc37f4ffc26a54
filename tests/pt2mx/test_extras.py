"""Imports of optional packages: of a torchvision whose library loads, and of one whose library does not."""

import os

import pytest

from pt2mx import MXError
from pt2mx.extras import import_extra

_NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: beginnings of a package: `half` is imported before the package can fail
_TORCHVISIONS = {
    # as a CPU build does; a C++ library would end the process where the operator is there already
    "library that loads": f"""
import torch
from torchvision import half
library = torch.library.Library("torchvision", "DEF")
library.define("{_NMS}")
""",
    # as with a CUDA build of torchvision and a CPU build of torch: the schemas are missing
    "library that does not load": """
import torch
from torchvision import half
torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: scores)
""",
}
_IMPORT = """
import sys
import torch
from pt2mx.extras import import_extra
torchvision = import_extra("torchvision", "vision")
assert import_extra("torchvision", "vision") is torchvision is sys.modules["torchvision"]
assert sys.modules["torchvision.half"] is torchvision.half
print(torchvision.name, torchvision.half.times(), hasattr(torch.ops.torchvision, "nms"))
"""


@pytest.mark.slow_except("library that does not load")
@pytest.mark.parametrize("kind", _TORCHVISIONS)
@pytest.mark.compiled_cases("library that does not load")
def test_torchvision(run_python, tmp_path, kind):
    """No module of a failed import is left."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(_TORCHVISIONS[kind] + f"name = {kind!r}\n")
    (package / "half.py").write_text("count = 0\ndef times():\n    global count\n    count += 1\n    return count\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run_python(_IMPORT, env={**os.environ, "PYTHONPATH": path}).strip() == f"{kind} 1 True"


@pytest.mark.compiled
def test_another_fault_is_reported(run_python, tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('another fault')")
    code = (
        "from pt2mx.extras import import_extra\n"
        "try: import_extra('torchvision', 'vision')\n"
        "except Exception as error: print(repr(error))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run_python(code, env={**os.environ, "PYTHONPATH": path}).strip() == "RuntimeError('another fault')"


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_names_its_extra(package):
    with pytest.raises(MXError, match=rf"{package} is not installed: pip install 'pt2mx\[vision\]'"):
        import_extra(package, "vision")
