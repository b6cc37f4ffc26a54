"""The lowering as a pass of Inductor: `torch.compile` then lowers a converted model."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from pt2mx.fx.graph.graph_pass import run_passes
from pt2mx.fx.graph.node import model_of
from pt2mx.fx.lower import PASSES


class LoweringPass(CustomGraphPass):
    """The passes of `lower_to_inductor` as one pass of Inductor, which runs on each graph that torch.compile compiles.

    It is Inductor's `pre_grad_custom_pass`, which runs before AOTAutograd would decompose the operators. Weights are
    inputs there: the pass dequantizes those whose blocks do not run along the last dimension (`x @ w`, Hugging Face's
    Conv1D) at each call, and merges no linear layers. It skips graphs that write tensors by anything but operators;
    converted models do not.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
        >>> y = prepared(x)
        >>> converted = pt2mx.convert_pt2e(prepared)
        >>> lowering = pt2mx.LoweringPass()
        >>> compiled = torch.compile(converted, options={"pre_grad_custom_pass": lowering})  # at its first call
        >>> lowering(converted.graph)  # the same by hand
        >>> "linear_mx" in converted.code
        True
    """

    def __call__(self, graph: Graph) -> None:
        if not any(map(_writes_unseen, graph.nodes)):
            passes = [entry.graph_pass for entry in PASSES if entry.option is None and not entry.needs_weights]
            run_passes(model_of(graph), passes)

    def uuid(self) -> str:
        """Return a digest of the passes' sources, which Inductor makes part of its cache keys."""
        sources = sorted(Path(__file__).parent.rglob("*.py"))
        return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


_IN_PLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv}


def _writes_unseen(node: Node) -> bool:
    """Return whether a node may write to a tensor although no operator schema says so."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    function = node.op == "call_function" and not hasattr(node.target, "_schema")
    return method or (function and (node.target in _IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))))
