"""The bytes of a model's tensors: in the float model, and in the converted one.

Nothing is a difference. Tensors count by the memory that they show, packed weights by their codes and scales; a float
weight stays in the converted model where something else reads it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.fx import GraphModule

from pt2mx import ops
from pt2mx.fx.graph.attributes import attribute_of, name_of
from pt2mx.fx.graph.node import node_arg
from pt2mx.fx.graph.subgraphs import captured_operands, graph_modules
from pt2mx.pt2e.observer import MXObserver
from pt2mx.pt2e.report.sources import Size, buffers_of, size_of, sources_of_codes

#: meta key of a prepared or converted model: the `Size` of the float model
FLOAT_SIZE_KEY = "mx_float_size"

#: what the name of a buffer of codes has behind the parameter's
_CODES = re.compile(r"_data(_\d+)?$")


def tensors_of(model: GraphModule) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants of a model by name, without the sums of its observers."""
    observers = [module for module in model.modules() if isinstance(module, MXObserver)]
    sums = {id(buffer) for observer in observers for buffer in observer.buffers()}
    named: dict[str, object] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for node in model.graph.find_nodes(op="get_attr"):  # export leaves constants as plain attributes
        named.setdefault(name_of(node), attribute_of(model, node))
    return {name: value for name, value in named.items() if isinstance(value, Tensor) and id(value) not in sums}


def float_size(model: GraphModule) -> Size:
    """Return the size of the float model: what preparation noted, else that of the tensors of `model`, where packed
    weights count as what they were computed from."""
    if FLOAT_SIZE_KEY in model.meta:
        return model.meta[FLOAT_SIZE_KEY]
    held, outside = tensors_of(model), captured_operands(model)
    buffers: set[str] = set()
    # parameter -> format -> its parts: one that is packed in two formats was one parameter
    packed: dict[str, dict[str, dict[str, Size]]] = defaultdict(lambda: defaultdict(dict))
    for graph in graph_modules(model):
        for node in graph.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
            stored = [name for position in (0, 1) for name in buffers_of(node_arg(node, position), outside)]
            buffers.update(stored)
            for source in sources_of_codes(node, outside) if stored else ():
                for name, size in source.tensors.items():
                    parameter = _CODES.sub("", name) if name in buffers else name
                    packed[parameter][str(node.args[2:6])][name] = size
    missing = [formats for parameter, formats in packed.items() if parameter not in held]
    sizes = [max(_sum(parts.values()) for parts in formats.values()) for formats in missing]
    return _sum([size_of(tensor for name, tensor in held.items() if name not in buffers), *sizes])


def _sum(sizes: Iterable[Size]) -> Size:
    return Size(*map(sum, zip(*sizes, strict=True)))
