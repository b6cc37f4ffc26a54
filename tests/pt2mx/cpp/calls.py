"""Call the operators of the C++ library in a process without pt2mx, and compare them with Python's to the bit."""

import subprocess
import sys

import torch

import pt2mx
from pt2mx import MXSpec, cpp
from tests.compare import differing

ours = torch.ops.pt2mx

#: the code of the other process, which imports torch and loads the library
CALLS = """
import sys, torch
library, inputs, outputs = sys.argv[1:]
torch.ops.load_library(library)
assert "pt2mx" not in sys.modules
calls = torch.load(inputs)
with torch.no_grad():
    torch.save([getattr(torch.ops.pt2mx, name)(*args) for name, args in calls], outputs)
"""


def check(calls, tmp_path):
    """Check that each call (name, arguments) returns the same in both processes."""
    inputs, outputs = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    torch.save(calls, inputs)
    command = [sys.executable, "-W", "error", "-c", CALLS, str(cpp.library_path()), str(inputs), str(outputs)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for (name, args), results in zip(calls, torch.load(outputs), strict=True):
        expected = getattr(ours, name)(*args)
        if torch.is_tensor(expected):
            results, expected = [results], [expected]
        for actual, value in zip(results, expected, strict=True):
            assert actual.shape == value.shape and actual.dtype == value.dtype
            assert actual.stride() == value.stride()
            context = name, [a for a in args if not torch.is_tensor(a)], actual.shape
            assert not differing(actual, value).any(), context


def packed(shape, element, block_size):
    """(scales, codes), the first block an Inf."""
    x = torch.randn(shape)
    x.view(-1)[:1] = torch.inf
    return pt2mx.quantize_mx(x, MXSpec(element, block_size))
