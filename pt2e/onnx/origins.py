"""Operators of the float model in an ONNX file: a file notes which of its values each of them gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pt2mx.fx.graph.source_node import nodes_by_source

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch.fx import Graph

#: key of a file's metadata: JSON, the name of a value by the origin of the node that it was made from
_KEY = "pt2mx.origins"


def note_origins(model: ModelProto, graph: Graph) -> None:
    """Note in a model what its values were in the graph that it was made from, whose names they have."""
    values = {value for node in model.graph.node for value in node.output}
    origins = {origin: node.name for origin, node in nodes_by_source(graph).items() if node.name in values}
    model.metadata_props.add(key=_KEY, value=json.dumps(origins))


def origins_of(model: ModelProto) -> dict[str, str]:
    """Origin -> the value in a model; empty where the model has no note."""
    noted = [prop.value for prop in model.metadata_props if prop.key == _KEY]
    return json.loads(noted[0]) if noted else {}
