"""The settings of a quantizer, applied to the nodes of an ONNX graph.

A setting means a node by the node's name, with "/" as "." too, by the scopes that torch.onnx.export notes in it, and by
the module that a weight's name tells: `conv1` means the node that reads `conv1.weight`. Types are those of ONNX
("Conv") and the classes that the exporter notes.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping

import torch
from onnx import NodeProto
from torch.fx import Graph, Node

from pt2mx import quark
from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.float_operators import ATEN
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import OPERANDS
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe import ORDER
from pt2mx.pt2e.quantizer.settings import Config


def quantizer_of(config: object) -> MXQuantizer:
    """The quantizer that a config stands for, as `quantize_onnx` takes it.

    Raises:
        MXError: for another object.
    """
    if isinstance(config, Mapping):
        spec = quark.mx_spec(config)
        config = MXQuantizationConfig(activation=spec, weight=spec)
    if isinstance(config, MXQuantizationConfig):
        config = MXQuantizer().set_global(config)
    if isinstance(config, str | os.PathLike):
        config = MXQuantizer.from_recipe(config)
    if not isinstance(config, MXQuantizer):
        raise MXError(
            f"config must be an MXQuantizer, an MXQuantizationConfig, the name or file of a recipe, or Quark's "
            f"dictionary of {', '.join(quark.MX_OP_DEFAULT_ATTRS)}, not {config!r}"
        )
    return config


class NodeSettings(MXQuantizer):
    """The settings of a quantizer for nodes that stand for those of ONNX.

    Raises:
        MXError: for settings that are not for ONNX files.
    """

    def __init__(self, quantizer: MXQuantizer) -> None:
        super().__init__()
        self.__dict__.update(vars(quantizer))
        elsewhere = {"algorithms": self.algorithms, "kv_cache": self.kv_cache, ORDER: self._settings[ORDER]}
        for name, value in elsewhere.items():
            if value:
                raise MXError(f"{name} is not for ONNX files: take it out of the settings, or quantize the torch model")
        self._matched: set[tuple[str, object]] = set()
        self._candidates_seen: list[Node] = []

    def config_of(self, node: Node) -> tuple[Config, str]:
        """The config of a node, and the reason if it is None."""
        self._candidates_seen.append(node)
        return self._config_of(node, {}, self._matched, constants=set())  # a stand-in has no operands

    def at_the_ends(self, quantized: list[Node]) -> dict[Node, tuple[Config, str]]:
        """The configs of some quantized nodes by `set_first` and `set_last`, in the order of execution."""
        found = {}
        for node, (source, config) in self._at_the_ends(quantized).items():
            self._matched.add(source)
            found[node] = (config, f"excluded by {source[0]} {source[1]}")
        return found

    def warn_unmatched(self) -> None:
        """Warn of settings that meant no node."""
        self._warn_unmatched(self._candidates_seen, self._matched)


def stand_in(node: NodeProto, graph: Graph) -> Node:
    """A node of torch.fx in place of one of ONNX: the modules around it, the operator it was exported from."""
    noted = {prop.key.rpartition(".")[2]: prop.value for prop in node.metadata_props}
    scopes, classes = (_list(noted.get(key)) for key in ("name_scopes", "class_hierarchy"))
    modules = list(zip(scopes, classes, strict=False))[:-1]  # the last is the operator
    weights = [name.rpartition(".")[0] for name in node.input if "." in name]
    modules += [(name, "") for name in weights]
    dotted = node.name.strip("/").replace("/", ".")
    modules += [(name, node.op_type) for name in dict.fromkeys((dotted, node.name))]
    operator = _operator(classes[-1]) if classes else None
    found = graph.create_node("call_function", operator or ATEN[node.op_type], name=dotted.replace(".", "_"))
    found.meta["nn_module_stack"] = {str(i): module for i, module in enumerate(modules)}
    return found


def name_and_type(place: Node) -> tuple[str, str]:
    """The name and the type of the node of ONNX that a stand-in is for."""
    return [*place.meta["nn_module_stack"].values()][-1]


def _list(text: str | None) -> list[str]:
    try:
        found = ast.literal_eval(text or "[]")
    except (SyntaxError, ValueError):
        return []
    return [str(item) for item in found] if isinstance(found, list) else []


def _operator(name: str) -> torch._ops.OpOverload | None:
    """The operator `aten.linear.default`, where it is one that is quantized."""
    if name.removesuffix(".default") not in OPERANDS:
        return None
    packet, overload = name.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)
