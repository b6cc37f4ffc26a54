"""An ONNX file as a stage: onnxruntime computes the values of the float model's operators.

The file records the source node of each value. Two sessions run it. In one, these values are outputs too: the
propagated values. In the other, the users of such a value read an input instead, which gets the float model's value;
one run then computes every isolated value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.export import source_nodes_of

#: suffix of the input that replaces a value
_FLOAT = "/float"
#: severity of onnxruntime's log; its warnings do not concern the user
_ERRORS_ONLY = 3


class OnnxStage:
    """A file that `export_onnx` wrote; errors call it `name`."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.onnx = import_extra("onnx", "onnx")
        self.runtime = import_extra("onnxruntime", "onnx")
        if not Path(path).is_file():
            raise MXError(f"the stage {name!r} is no file: {os.fspath(path)!r}")
        from pt2mx.pt2e.onnx.files import read_model  # imports onnx

        self.name = name
        self.model = read_model(path)
        self.source_nodes = source_nodes_of(self.model)
        if not self.source_nodes:
            raise MXError(f"the stage {name!r} does not note what its values are: write it by pt2mx.export_onnx")
        initializers = {tensor.name for tensor in self.model.graph.initializer}
        self.inputs = [value.name for value in self.model.graph.input if value.name not in initializers]
        self.outputs = [value.name for value in self.model.graph.output]
        self._sessions: tuple[Any, Any] | None = None

    def run(
        self, leaves: Mapping[str, Any], known: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        """Run a batch: `leaves` are the inputs of the float model by the names of its placeholders, `known` its values
        by source node, floating tensors.

        Returns:
            Source node -> propagated value; source node -> isolated value; the outputs.
        """
        values = {source: value for source, value in self.source_nodes.items() if source in known}
        if self._sessions is None:
            like = {value: known[source] for source, value in values.items()}
            self._sessions = self._session(like, cut=False), self._session(like, cut=True)
        inputs = self._inputs(leaves)
        floats = {f"{value}{_FLOAT}": _array(known[source]) for source, value in values.items()}
        names = list(dict.fromkeys([*values.values(), *self.outputs]))
        by_name = dict(zip(names, self._run(self._sessions[0], names, inputs), strict=True))
        isolated = self._run(self._sessions[1], list(values.values()), inputs | floats)
        propagated = {source: by_name[value] for source, value in values.items()}
        return propagated, dict(zip(values, isolated, strict=True)), [by_name[name] for name in self.outputs]

    def _session(self, like: Mapping[str, Tensor], cut: bool) -> Any:
        """Return a session with these values, by name, as outputs too. If `cut`, their users read inputs instead."""
        model, helper = self.onnx.ModelProto(), self.onnx.helper
        model.CopyFrom(self.model)
        outputs = [value for value in like if value not in self.outputs]
        model.graph.output.extend(self.onnx.ValueInfoProto(name=value) for value in outputs)
        if cut:
            for value, tensor in like.items():
                element = helper.np_dtype_to_tensor_dtype(_array(tensor).dtype)
                sizes = [None] * tensor.dim()
                model.graph.input.append(helper.make_tensor_value_info(f"{value}{_FLOAT}", element, sizes))
            for node in model.graph.node:
                for i, value in enumerate(node.input):
                    if value in like:
                        node.input[i] = f"{value}{_FLOAT}"
        options = self.runtime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.graph_optimization_level = self.runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        data = model.SerializeToString()
        return self.runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def _inputs(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        named = leaves if set(self.inputs) <= set(leaves) else dict(zip(self.inputs, leaves.values(), strict=False))
        if len(named) < len(self.inputs):
            raise MXError(f"the stage {self.name!r} takes {', '.join(self.inputs)}, the model {', '.join(leaves)}")
        return {name: _array(named[name]) for name in self.inputs}

    def _run(self, session: Any, names: Sequence[str], inputs: Mapping[str, Any]) -> list[Tensor]:
        try:
            return [torch.from_numpy(array) for array in session.run(names, inputs)]
        except Exception as error:  # onnxruntime's own
            raise MXError(f"the stage {self.name!r} does not run: {str(error).splitlines()[0]}") from error


def _array(value: Any) -> Any:
    return (value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value)).numpy()
