"""The search for patches finds what replaces or extends a library's function, and nothing else."""

import functools
import inspect

import pytest
import torch
from torch.fx import GraphModule

from tests.patches import patched


def function(module):
    return module


@functools.wraps(GraphModule.recompile)
def named_like_torch_s(module):
    return module


class Descriptor:
    def __get__(self, instance, owner):
        return function


@pytest.mark.compiled_except("GraphModule-recompile-value2", "GraphModule-code-*", "torch.export-*")
@pytest.mark.parametrize(
    ("owner", "attribute", "value"),
    [
        (GraphModule, "recompile", function),
        (GraphModule, "recompile", named_like_torch_s),
        (GraphModule, "recompile", functools.partial(function)),
        (GraphModule, "forward", Descriptor()),
        (GraphModule, "code", property(function)),
        (torch.nn.Module, "planted", staticmethod(function)),
        (torch.export, "export", function),
    ],
)
def test_a_patch_is_found(owner, attribute, value, monkeypatch):
    assert not patched()
    monkeypatch.setattr(owner, attribute, value, raising=False)
    name = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    assert patched() == [f"{name}.{attribute} by {__name__}"]
