"""A node of a graph in words: its operator, shape, format and place."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import called, is_ours, named_args, value_of
from pt2mx.fx.graph.source_node import modules_of
from pt2mx.pt2e.observer import MXObserver
from pt2mx.spec import MXSpec

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.uint8: "u8"}


def operator_text(node: Node) -> str:
    """The operator that a node calls, or the name that it reads."""
    operator = called(node)
    if isinstance(operator, OpOverload):
        return str(operator).removesuffix(".default")
    if node.op != "call_function":
        return f"{node.op} {node.target}" if node.op in ("get_attr", "call_module") else node.op
    return str(getattr(node.target, "__name__", node.target) if callable(node.target) else node.target)


def shape_text(node: Node) -> str:
    """The dtype and extent of a node's value, such as `f32[2, 64]`."""
    return _shape(value_of(node))


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(_shape(one) for one in value)
    return "" if value is None else str(value)


def format_text(node: Node, model: GraphModule) -> str:
    """The spec of what an operator of ours or an observer does to its values or weights."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return str(module.spec) if isinstance(module, MXObserver) else ""
    if not is_ours(node):
        return ""
    named = named_args(node)
    if "elem_dtype_name" not in named or "block_size" not in named:
        return ""
    return str(MXSpec(named["elem_dtype_name"], named["block_size"]))


def modules_around(node: Node) -> list[str]:
    """The names of the modules around a node, outermost first, without the root."""
    return [name for name, _ in modules_of(node) if name]


def module_text(node: Node) -> str:
    """The name of the innermost module around a node."""
    return (modules_around(node) or [""])[-1]


def source_text(node: Node) -> str:
    """The innermost line of the model's own source that a node was traced at."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{Path(path).name}:{line}" for path, line in frames if "/torch/" not in Path(path).as_posix()]
    return own[-1] if own else ""
