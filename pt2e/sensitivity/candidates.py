"""A model prepared with one candidate config, whose modules can be quantized one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.source_node import module_name
from pt2mx.pt2e.flow.observed_modules import ObservedModule, observed_modules
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.observe.observer import MXObserver, observer_of
from pt2mx.pt2e.observe.switches import disable_fake_quant, disable_observer
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.sensitivity.tensor_scales import calibrate_tensor_scales


@dataclass
class Candidate:
    """A prepared model in which nothing is quantized until `quantizing` enables it.

    `modules` are those with something to quantize, by name.
    """

    model: GraphModule
    modules: dict[str, ObservedModule]

    @classmethod
    def of(cls, model: GraphModule, config: MXQuantizationConfig, batches: Sequence[Any]) -> Candidate:
        """Prepare the model with a config. Static tensor scales follow from the batches."""
        prepared = prepare_pt2e(model, MXQuantizer().set_global(config))
        calibrate_tensor_scales(prepared, batches)
        for graph in graph_modules(prepared):
            _separate_observers(graph)
        disable_observer(prepared)
        disable_fake_quant(prepared)
        modules = {name: m for name, m in observed_modules(prepared).items() if m.weights or m.activations}
        return cls(prepared, modules)

    @contextmanager
    def quantizing(self, modules: Mapping[str, str]) -> Iterator[GraphModule]:
        """Yield the model with these modules quantized: name -> which operands."""
        with ExitStack() as stack:
            for name, operands in modules.items():
                for observer in self.observers(name, operands):
                    observer.enable_fake_quant()
                    stack.callback(observer.disable_fake_quant)
            yield self.model

    def observers(self, name: str, operands: str) -> list[MXObserver]:
        """Return the observers of a module that quantize these operands: "both", "weights", "activations" or "none"."""
        module = self.modules[name]
        observers: list[MXObserver] = []
        if operands in ("both", "weights"):
            observers += [weight.observer for weight in module.weights]
        if operands in ("both", "activations"):
            observers += module.activations
        return observers


def _separate_observers(graph: GraphModule) -> None:
    """Give each module its own observer of a tensor that several modules read."""
    for node in list(graph.graph.nodes):
        observer = observer_of(node)
        if observer is None:
            continue
        _, *others = dict.fromkeys(module_name(user) for user in node.users)
        for i, name in enumerate(others):
            target = f"{node.target}_{i}_of_{len(others)}"
            graph.add_submodule(target, copy.deepcopy(observer))
            with graph.graph.inserting_after(node):
                copied = graph.graph.call_module(target, node.args)
            copied.meta.update(node.meta)
            for user in list(node.users):
                if module_name(user) == name:
                    user.replace_input_with(node, copied)
    graph.recompile()


def is_quantized(node: Node) -> bool:
    """Return True for an operator with a quantizable operand; in a prepared graph an LSTM is a module."""
    return node.op in ("call_function", "call_module") and any(map(observer_of, node.all_input_nodes))
