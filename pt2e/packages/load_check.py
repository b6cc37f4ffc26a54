"""Load-test a GPU package in a subprocess, because a badly linked one crashes the process."""

from __future__ import annotations

import subprocess
import sys

import torch

from pt2mx.errors import MXError

_LOAD = "import sys, torch, pt2mx; torch._inductor.aoti_load_package(sys.argv[1])"


def check_loads(path: str, device: torch.device) -> None:
    """Load a package in a child process.

    Packages for a CPU are not loaded: none was seen to crash, and a child process takes seconds.

    Raises:
        MXError: where the child crashed, or could not load the package.
    """
    if device.type == "cpu":
        return
    child = subprocess.run([sys.executable, "-c", _LOAD, path], capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode < 0:
        raise MXError(
            f"the machine code for {device} crashes while torch {torch.__version__} loads it (signal "
            f"{-child.returncode}), as any package does if the C++ compiler links libstdc++ statically: set "
            "CXX to one that links it dynamically, or use torch.compile"
        )
    if child.returncode:
        raise MXError(f"the machine code for {device} cannot be loaded: {child.stderr.strip().splitlines()[-1]}")
