"""An ONNX file as a stage: its values are found by the operators that they were made from, and computed in onnxruntime.

Two sessions run a file. In one each value that is found is an output too: these are the propagated values. In the other
what reads such a value reads an input in its place, to which the float model's value is given: one run then gives every
isolated value.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.extras import import_extra

#: end of the name of the input that stands for a value
_GIVEN = "/given"
#: what onnxruntime says below an error is its own affair
_ERRORS_ONLY = 3


class OnnxStage:
    """A file that `export_onnx` wrote.

    Args:
        path: of the file.
        name: of the stage, for errors.

    Raises:
        MXError: for what is no such file.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.onnx, self.runtime = (import_extra(package, "onnx") for package in ("onnx", "onnxruntime"))
        if not Path(path).is_file():
            raise MXError(f"the stage {name!r} is no file: {os.fspath(path)!r}")
        self.name = name
        self.model = importlib.import_module("pt2mx.pt2e.onnx.files").read_model(path)
        self.origins = importlib.import_module("pt2mx.pt2e.onnx.origins").origins_of(self.model)
        if not self.origins:
            raise MXError(f"the stage {name!r} does not note what its values are: write it by pt2mx.export_onnx")
        held = {tensor.name for tensor in self.model.graph.initializer}
        self.inputs = [value.name for value in self.model.graph.input if value.name not in held]
        self.outputs = [value.name for value in self.model.graph.output]
        self._sessions: tuple[Any, Any] | None = None

    def run(
        self, leaves: Mapping[str, Any], known: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        """Run a batch.

        Args:
            leaves: the inputs of the float model, by the names of its placeholders.
            known: the values of the float model's operators, floating tensors, by origin.

        Returns:
            Origin -> propagated value; origin -> isolated value; the outputs.

        Raises:
            MXError: where the file takes other inputs.
        """
        found = {origin: value for origin, value in self.origins.items() if origin in known}
        if self._sessions is None:
            like = {value: known[origin] for origin, value in found.items()}
            self._sessions = self._session(like, cut=False), self._session(like, cut=True)
        inputs = self._inputs(leaves)
        given = {f"{value}{_GIVEN}": _array(known[origin]) for origin, value in found.items()}
        names = list(dict.fromkeys([*found.values(), *self.outputs]))
        whole = dict(zip(names, self._ran(self._sessions[0], names, inputs), strict=True))
        alone = self._ran(self._sessions[1], list(found.values()), inputs | given)
        propagated = {origin: whole[value] for origin, value in found.items()}
        return propagated, dict(zip(found, alone, strict=True)), [whole[name] for name in self.outputs]

    def _session(self, like: Mapping[str, Tensor], cut: bool) -> Any:
        """A session that gives these values too, by name; where it is `cut`, what reads them reads inputs."""
        model, helper = self.onnx.ModelProto(), self.onnx.helper
        model.CopyFrom(self.model)
        outputs = [value for value in like if value not in self.outputs]
        model.graph.output.extend(self.onnx.ValueInfoProto(name=value) for value in outputs)
        if cut:
            for value, tensor in like.items():
                element = helper.np_dtype_to_tensor_dtype(_array(tensor).dtype)
                extents = [None] * tensor.dim()
                model.graph.input.append(helper.make_tensor_value_info(f"{value}{_GIVEN}", element, extents))
            for node in model.graph.node:
                for i, value in enumerate(node.input):
                    if value in like:
                        node.input[i] = f"{value}{_GIVEN}"
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

    def _ran(self, session: Any, names: Sequence[str], inputs: Mapping[str, Any]) -> list[Tensor]:
        try:
            return [torch.from_numpy(array) for array in session.run(names, inputs)]
        except Exception as error:  # onnxruntime's own
            raise MXError(f"the stage {self.name!r} does not run: {str(error).splitlines()[0]}") from error


def _array(value: Any) -> Any:
    return (value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value)).numpy()
