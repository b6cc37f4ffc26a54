"""The option `--device`."""

import torch

from pt2mx.errors import MXError


def check_device(device: str) -> None:
    """Raise an `MXError` for a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MXError("--device cuda needs an NVIDIA GPU and a torch that is built for it: leave it out for the CPU")
