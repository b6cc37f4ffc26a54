"""Second-order estimates: what the error of each operator does to the output, by backward passes through one run.

An operator's error e in its output moves the model's output by J e. With a random direction v of the metric's curvature
H there, g = J' v is one backward pass, and (g' e)^2 / 2 has the mean e' J' H J e / 2: the distance that the metric sees
of a small e. Each candidate's e is that of its operator alone, run on the float model's inputs. The items of a batch
(dimension 0) are samples of their own: one pass gives as many as there are items.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.origins import by_origin, origin
from pt2mx.pt2e.debug.differences import comparable
from pt2mx.pt2e.debug.watched import Watched, leaves_of
from pt2mx.pt2e.sensitivity.forms import Form
from pt2mx.pt2e.sensitivity.metrics import Metric, outputs_of


class _WithGradients(Watched):
    """A run after which `gradients` has those of the operators that are wanted, by key."""

    def __init__(self, model: GraphModule, wanted: set[str]) -> None:
        super().__init__(model, lambda key, node, value, watched: None)
        self.wanted, self.probes = wanted, dict[str, Tensor]()

    def run_node(self, node: Node) -> Any:
        """Run a node; what is wanted gets a zero added, whose gradient is its own."""
        value = super().run_node(node)
        if self.keys.get(node) in self.wanted and isinstance(value, Tensor) and value.is_floating_point():
            probe = self.probes[self.keys[node]] = torch.zeros_like(value, requires_grad=True)
            return value + probe
        return value


def estimates(
    model: GraphModule,
    forms: dict[str, Form],
    operands: tuple[str, ...],
    batch: Any,
    metric: Metric,
    draws: int,
    seed: Generator,
) -> tuple[dict[tuple[str, str, str], float], float]:
    """(module, candidate, operands) -> the estimated distance of the outputs of a batch, as a sum; and what it is
    divided by. Operators inside of conditions and loops have none.

    Args:
        draws: how many directions, one backward pass each.
    """
    wanted = {origin(node) for form in forms.values() for nodes in form.operators.values() for node in nodes}
    leaves = leaves_of(model, batch)
    with torch.enable_grad():
        run = _WithGradients(model, wanted & by_origin(model.graph).keys())
        outputs = outputs_of(run.run(*leaves, enable_io_processing=False))
        gradients = [_gradients(outputs, run.probes, metric, seed) for _ in range(draws)]
    count = sum(metric.distance(y.detach(), y.detach())[1] for y in outputs)
    known = {key: _detached(run.env[node]) for node, key in run.keys.items()}
    found: dict[tuple[str, str, str], float] = {}
    with torch.no_grad():
        for candidate, form in forms.items():
            again = _ready(form.model, leaves)
            for name, nodes in form.operators.items():
                for which in operands:
                    with form.quantizing({name: which}):
                        terms = [_term(again, node, known, gradients) for node in nodes]
                    if any(term is not None for term in terms):
                        found[name, candidate, which] = sum(term or 0.0 for term in terms)
    return found, count


def _gradients(
    outputs: list[Tensor], probes: dict[str, Tensor], metric: Metric, seed: Generator
) -> dict[str, Tensor | None]:
    """Those of the operators, by key, in a random direction; None where an output does not depend on it."""
    total = torch.stack([(y * metric.direction(y.detach(), seed)).sum() for y in outputs]).sum()
    found = torch.autograd.grad(total, list(probes.values()), allow_unused=True, retain_graph=True)
    return dict(zip(probes, found, strict=True))


def _ready(model: GraphModule, leaves: list[Any]) -> Watched:
    """A run of a graph that has not begun, of which cones can be computed."""
    watched = Watched(model, lambda key, node, value, watched: None)
    watched.env.update(zip(model.graph.find_nodes(op="placeholder"), leaves, strict=True))
    for node in model.graph.find_nodes(op="get_attr"):
        watched.env[node] = watched.fetch_attr(str(node.target))
    return watched


def _term(again: Watched, node: Node, known: dict[str, Any], gradients: list[dict[str, Tensor | None]]) -> float | None:
    """Half the sum over items of (g' e)^2, the mean of all draws; None where the operator's gradient is not known."""
    key = again.keys.get(node, "")
    drawn = [one[key] for one in gradients if one.get(key) is not None]
    if not drawn or not comparable(value := again.again(node, known), known[key]):
        return None
    error = (value.double() - known[key].double()).flatten(1)
    moved = torch.stack([(one.double().flatten(1) * error).sum(-1) for one in drawn if one is not None])
    return 0.5 * moved.square().sum().item() / len(drawn)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
