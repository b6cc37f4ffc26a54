"""Declare the operators without which a CUDA build of torchvision does not import where torch is a CPU build.

Package indexes have one build of each version. Where torch comes from elsewhere, as a CPU build, the library of PyPI's
torchvision does not load, and `import torchvision` fails as it registers fake kernels for operators that the library
would have defined; so does whatever imports torchvision, as transformers' models do. With the schemas declared it
imports, and works but for its own operators, whose functions say that they are not there.

`make` installs this module into the environment that it makes, and nowhere else. torch calls `declare`, an entry point
of the group "torch.backends", at the end of `import torch`.
"""

import importlib.util
from pathlib import Path

import torch
from torch.library import Library

#: operators that torchvision registers fake kernels for, though they may not be there
_SCHEMAS = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]

#: schemas last as long as their library
_declared: list[Library] = []


def declare() -> None:
    """Declare the operators if torch is a CPU build and torchvision a CUDA build. A library that loads declares them
    itself, and two declarations are an error."""
    torchvision = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or torchvision is None or torchvision.origin is None:
        return
    version = Path(torchvision.origin).with_name("version.py")
    if version.exists() and "+cu" in version.read_text():
        library = Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)
