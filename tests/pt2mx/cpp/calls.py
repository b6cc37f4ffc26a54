"""Call the operators of the C++ library in a process without pt2mx, and compare them with Python's to the bit."""

import torch

import pt2mx
from pt2mx import MXSpec, cpp
from tests.compare import differing
from tests.fresh_process import Finished, run_program

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


def run_calls(calls, tmp_path) -> Finished:
    """The process, after it ran the calls; their results are in tmp_path / "outputs.pt"."""
    torch.save(calls, tmp_path / "inputs.pt")
    arguments = str(cpp.library_path()), "inputs.pt", "outputs.pt"
    return run_program(CALLS, "calls.py", tmp_path, [("error",)], arguments)


def check(calls, tmp_path):
    """Check that each call (name, arguments) returns the same in both processes."""
    result = run_calls(calls, tmp_path)
    assert (result.status, result.err) == (0, "")
    for (name, args), results in zip(calls, torch.load(tmp_path / "outputs.pt"), strict=True):
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
