"""A prepared model, module by module: the quantized operands of each, and their observers.

Modules are the units that a recipe can address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules
from pt2mx.fx.graph.node import node_arg
from pt2mx.fx.graph.source_node import module_name
from pt2mx.pt2e.flow.shared_scales import connected
from pt2mx.pt2e.flow.sizes import sources_of
from pt2mx.pt2e.flow.weights import constants_of
from pt2mx.pt2e.observe.observer import MXObserver, observer_of
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, operand_node, operands_of, quantizable_operators, role_of


@dataclass
class ObservedWeight:
    """A constant operand: its source tensor, its shape, and its observer."""

    source: str
    shape: tuple[int, ...]
    observer: MXObserver


@dataclass
class ObservedModule:
    """The quantizable operators of a module: config (None: skipped), operands, and all roles by operand name."""

    config: MXQuantizationConfig | None
    roles: dict[str, str] = field(default_factory=dict)
    weights: list[ObservedWeight] = field(default_factory=list)
    activations: list[MXObserver] = field(default_factory=list)


def observed_modules(prepared: GraphModule) -> dict[str, ObservedModule]:
    """Return the modules with quantizable operators, by qualified name."""
    modules: dict[str, ObservedModule] = {}
    captured = captured_operands(prepared)
    for inner in graph_modules(prepared):
        constants = constants_of(inner)
        for node in quantizable_operators(inner.graph):
            name, config = module_name(node), node.meta.get(CONFIG_KEY)
            if config is not None:
                config = replace(config, observer=None)
            module = modules.setdefault(name, ObservedModule(config))
            if module.config != config:
                raise MXError(
                    f"operators of the module {name!r} were prepared with different configs, or some of them left "
                    "alone: a recipe gives the operators of a module one; use settings by module"
                )
            if config is not None:
                _add_operands(module, node, constants, captured)
    return modules


def _add_operands(
    module: ObservedModule,
    node: Node,
    constants: set[Node],
    captured: Mapping[Node, Sequence[object]],
) -> None:
    for operand in operands_of(node):
        argument = operand_node(node, operand)
        if argument is None:
            continue
        role = module.roles[operand.name] = role_of(operand, argument, constants)
        observer = observer_of(argument)
        if observer is None:
            continue
        tensor = node_arg(argument)
        if role == "activation":
            module.activations.append(observer)
        elif role == "weight" and tensor in constants:
            shape = tuple(tensor.meta["val"].shape)
            module.weights += [ObservedWeight(s.name, shape, observer) for s in sources_of(tensor, captured)]


def sharing_weights(modules: dict[str, ObservedModule]) -> list[list[str]]:
    """Return the names of the modules with weights, grouped by weights that they share."""
    pairs = [(weight.source, name) for name, module in modules.items() for weight in module.weights]
    return [group for name, group in connected(pairs).items() if name == group[-1]]
