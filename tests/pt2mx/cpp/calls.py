"""Calls of the operators of the C++ library in a process without pt2mx, beside those of Python: equal to the bit."""

import subprocess
import sys

import torch

import pt2mx
from pt2mx import MXSpec, cpp
from tests.compare import differing

ours = torch.ops.pt2mx

#: what the other process does: it knows torch and the library
CALLS = """
import sys, torch
library, given, found = sys.argv[1:]
torch.ops.load_library(library)
assert "pt2mx" not in sys.modules
calls = torch.load(given)
with torch.no_grad():
    torch.save([getattr(torch.ops.pt2mx, name)(*args) for name, args in calls], found)
"""


def check(calls, tmp_path):
    """Each (name, arguments) gives the same in both processes."""
    given, found = tmp_path / "given.pt", tmp_path / "found.pt"
    torch.save(calls, given)
    command = [sys.executable, "-W", "error", "-c", CALLS, str(cpp.library_path()), str(given), str(found)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for (name, args), results in zip(calls, torch.load(found), strict=True):
        wanted = getattr(ours, name)(*args)
        if torch.is_tensor(wanted):
            results, wanted = [results], [wanted]
        for actual, expected in zip(results, wanted, strict=True):
            assert actual.shape == expected.shape and actual.dtype == expected.dtype
            assert actual.stride() == expected.stride()
            context = name, [a for a in args if not torch.is_tensor(a)], actual.shape
            assert not differing(actual, expected).any(), context


def packed(shape, element, block_size):
    """(scales, codes), the first block an Inf."""
    x = torch.randn(shape)
    x.view(-1)[:1] = torch.inf
    return pt2mx.quantize_mx(x, MXSpec(element, block_size))
