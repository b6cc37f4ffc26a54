"""The commands that repair packages which are installed and do not import."""

from __future__ import annotations

import re
from importlib import metadata

#: builds of torch and torchvision, by the part of their version after "+"
_BUILDS = "https://download.pytorch.org/whl"


def repair(distribution: str, reason: str) -> str:
    """Return the command that repairs a package.

    Args:
        distribution: its name on the package index.
        reason: the error of its import, which may be that of another package.
    """
    if distribution == "torchvision" or "torchvision::" in reason:
        return _install_torchvision()
    return f"pip install --force-reinstall {distribution}"


def _install_torchvision() -> str:
    """Return the command for a torchvision of the version and the build of torch: one of another build has a library
    that does not load, and its import fails as it reads the operators of that library."""
    torch, _, build = metadata.version("torch").partition("+")
    version = metadata.version("torchvision").partition("+")[0]
    index = f" --index-url {_BUILDS}/{build}" if build else ""
    requirements = [re.sub(r"[ ()]", "", text) for text in metadata.requires("torchvision") or ()]
    if f"torch=={torch}" in requirements:
        return f"pip install --force-reinstall --no-deps torchvision=={version}{index}"
    return f"pip install --force-reinstall torchvision torch=={torch}{index}"
