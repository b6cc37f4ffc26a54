"""`compare_stages`: measure the error of each operator in every form of a model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.analysis.agreement import comparable, is_floating, tensors_in
from pt2mx.errors import MXError
from pt2mx.fx.graph.source_node import module_name, nodes_by_source
from pt2mx.pt2e.debug.batches import arguments_of, check_values, copied, named_leaves, several
from pt2mx.pt2e.debug.errors import OUTPUT, OperatorErrors, StageComparison
from pt2mx.pt2e.debug.interpreter import (
    Pair,
    RecordingInterpreter,
    check_module,
    keyed_nodes,
    run,
    run_against,
    unchanged,
)
from pt2mx.pt2e.debug.onnx_stage import OnnxStage
from pt2mx.pt2e.debug.print_graph import operator_text
from pt2mx.pt2e.observe.observer import MXObserver

#: a form of a model: a graph, an ONNX file, or a function of the same inputs, whose outputs alone are compared
Stage = GraphModule | ExportedProgram | str | os.PathLike[str] | Callable[..., Any]


def compare_stages(
    float_model: GraphModule | ExportedProgram, stages: Mapping[str, Stage], batches: Iterable[Any]
) -> StageComparison:
    """Compare forms of a model with the float one, operator by operator.

    Each operator that a form shares with the float model has two errors. The propagated error is the error of its
    output in a run of the form, where everything before it is quantized too. The isolated error is the error of its
    output for the float model's inputs: only its own operands are quantized, so that a fault shows at the operator that
    causes it. The source node of each operator identifies it in every stage of the flow, also in a program that was
    saved. Operators in the branches of conditions and the bodies of loops are compared call by call.

    Args:
        float_model: the exported float model.
        stages: name -> prepared, converted, lowered or reloaded model; the path of an ONNX file that `export_onnx`
            wrote, which onnxruntime runs; or a function of the same arguments, such as a compiled model, whose outputs
            alone are compared.
        batches: inputs: each batch is a tensor, a tuple of positional or a dict of keyword arguments.

    Returns:
        The errors, worst first.

    Raises:
        MXError: for other objects, batches that the model does not take, no batch, and a form that shares no operator
            with the float model.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> exported = torch.export.export(model, (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> converted = pt2mx.convert_pt2e(prepared)
        >>> comparison = pt2mx.compare_stages(exported, {"converted": converted}, [x])
        >>> sorted(row.module for row in comparison.rows if row.isolated.sqnr < 30)
        ['0', '2']
    """
    reference = check_module(float_model, "float_model")
    if not isinstance(stages, Mapping) or not stages:
        raise MXError("stages must be a dict of at least one: name -> a form of the model")
    forms = {str(name): _form(form, str(name)) for name, form in stages.items()}
    errors = {name: _StageErrors() for name in forms}
    nodes = dict(keyed_nodes(reference))
    not_compared = {key for key, node in nodes.items() if node.op == "placeholder" or not node.users}
    operators: dict[str, None] = {}
    count = 0
    with torch.no_grad(), unchanged(reference, *forms.values()):
        for batch in several(batches):
            count += 1
            check_values(batch)
            values, outputs = _values_of(reference, batch)
            for key, of_calls in values.items():
                if key not in not_compared and is_floating(of_calls[0]):
                    operators[key] = None
            for name, form in forms.items():
                if isinstance(form, GraphModule):
                    with _quantizing(form):
                        errors[name].compare(form, batch, values, outputs)
                elif isinstance(form, OnnxStage):
                    errors[name].compare_file(form, reference, batch, values, outputs)
                else:
                    args, kwargs = copied(arguments_of(reference, batch))
                    errors[name].compare_outputs(form(*args, **kwargs), outputs)
    if not count:
        raise MXError("there is no batch to compare the stages with")
    for name, stage in errors.items():
        if not stage.rows:
            raise MXError(f"the stage {name!r} shares no operator with the float model: give forms of one export")
    return StageComparison.of({name: stage.rows for name, stage in errors.items()}, operators)


class _StageErrors:
    """The errors of the operators of one form."""

    def __init__(self) -> None:
        self.rows: dict[str, OperatorErrors] = {}

    def compare(self, form: GraphModule, batch: Any, values: Mapping[str, list[Any]], outputs: list[Tensor]) -> None:
        def compare(pair: Pair) -> None:
            row = self._row(pair.key, pair.node)
            row.propagated.add(pair.value, pair.want)
            isolated = pair.recomputed()
            if comparable(isolated, pair.want):
                row.isolated.add(isolated, pair.want)

        self.compare_outputs(run_against(values, form, batch, compare).outputs, outputs)

    def compare_file(
        self,
        form: OnnxStage,
        reference: GraphModule,
        batch: Any,
        values: Mapping[str, list[Any]],
        outputs: list[Tensor],
    ) -> None:
        nodes = nodes_by_source(reference.graph)
        known = {key: values[key][0] for key, node in nodes.items() if node.op != "placeholder"}
        known = {key: value for key, value in known.items() if is_floating(value)}
        propagated, isolated, got = form.run(named_leaves(reference, batch), known)
        for key, value in propagated.items():
            want = known[key].to(value.device)
            if comparable(value, want):
                row = self._row(key, nodes[key])
                row.propagated.add(value, want)
                row.isolated.add(isolated[key], want)
        self.compare_outputs(got, outputs)

    def compare_outputs(self, got: Any, outputs: list[Tensor]) -> None:
        tensors = tensors_in(got)
        if len(tensors) != len(outputs):
            raise MXError(f"a stage gives {len(tensors)} tensors where the float model gives {len(outputs)}")
        for i, (one, want) in enumerate(zip(tensors, outputs, strict=True)):
            if comparable(one, want):
                key = f"{OUTPUT} {i}"
                row = self.rows.setdefault(key, OperatorErrors("", OUTPUT, key))
                row.propagated.add(one.to(want.device), want)

    def _row(self, key: str, node: Node) -> OperatorErrors:
        if key not in self.rows:
            operator = node.all_input_nodes[0] if node.target is getitem else node
            self.rows[key] = OperatorErrors(module_name(node), operator_text(operator), key)
        return self.rows[key]


def _values_of(reference: GraphModule, batch: Any) -> tuple[dict[str, list[Any]], list[Tensor]]:
    """Return key -> the values of the float model, in the order of the calls; and its outputs."""
    values: dict[str, list[Any]] = defaultdict(list)

    def record(key: str, node: Node, value: Any, interpreter: RecordingInterpreter) -> None:
        values[key].append(value)

    return values, tensors_in(run(reference, batch, record).outputs)


@contextmanager
def _quantizing(form: GraphModule) -> Iterator[None]:
    """Turn fake quantization of a prepared model on and its observers off, within the block."""
    observers = [module for module in form.modules() if isinstance(module, MXObserver)]
    with ExitStack() as stack:
        for one in observers:
            stack.callback(one.enable_observer, one.observer_enabled)
            stack.callback(one.enable_fake_quant, one.fake_quant_enabled)
            one.disable_observer()
            one.enable_fake_quant()
        yield


def _form(form: object, name: str) -> GraphModule | OnnxStage | Callable[..., Any]:
    if isinstance(form, GraphModule | ExportedProgram):
        return check_module(form, f"the stage {name!r}")
    if isinstance(form, str | os.PathLike):
        return OnnxStage(form, name)
    if not callable(form):
        raise MXError(f"the stage {name!r} must be a graph, an ONNX file or a function, not {type(form).__name__}")
    return form
