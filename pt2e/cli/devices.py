"""The option `--device`."""

import argparse

import torch

from pt2mx.errors import MXError


def add_device(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"{meaning} (default: cpu)")


def check_device(device: str) -> None:
    """Raise an `MXError` for a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MXError("--device cuda needs an NVIDIA GPU and a torch that is built for it: leave it out for the CPU")
