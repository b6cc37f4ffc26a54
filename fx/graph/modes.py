"""Operators that compute differently in training and in evaluation: dropout, norms with running statistics, recurrent
networks.

The schema of an operator names the argument that sets its mode, so that no operator needs a row in a table.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch._ops import OpOverload
from torch.fx import Node

from pt2mx.fx.graph.node import OPERATOR_KEY

#: name of the argument that sets an operator's mode -> its value in evaluation
FLAGS: dict[str, bool | float] = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}

#: arguments with the running statistics of a norm
_STATISTICS = ("running_mean", "running_var")


class Mode(NamedTuple):
    """The argument that sets an operator's mode, and the arguments that the operator writes in training only.

    Args:
        flag: the argument's name.
        position: its position.
        evaluation: its value in evaluation.
        default: its value where a call leaves it out; None without a default.
        statistics: positions of the running statistics. A norm without them computes the same in both modes.
        written: names of the arguments that the operator writes in training and not in evaluation, whether its schema
            says so or not.
    """

    flag: str
    position: int
    evaluation: bool | float
    default: object
    statistics: tuple[int, ...]
    written: frozenset[str]


@functools.lru_cache(1024)
def mode_of(target: object) -> Mode | None:
    """Return the mode of an operator of aten; None for an operator that computes the same in both modes."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    names = [argument.name for argument in target._schema.arguments]
    flag = next((name for name in names if name in FLAGS), None)
    statistics = tuple(names.index(name) for name in _STATISTICS if name in names)
    if flag is None or ("momentum" in names and not statistics):  # a norm by the statistics of the batch alone
        return None
    position = names.index(flag)
    default = target._schema.arguments[position].default_value
    return Mode(flag, position, FLAGS[flag], default, statistics, _written_in_training(target, names))


def evaluates(node: Node) -> bool:
    """Return whether a call has a mode, and a literal sets it to evaluation for good."""
    mode = mode_of(node.target)
    if mode is None or OPERATOR_KEY in node.meta:  # it will follow the mode of the model
        return False
    passed = node.args[mode.position] if len(node.args) > mode.position else node.kwargs.get(mode.flag, mode.default)
    return passed == mode.evaluation


def writes_in_evaluation(target: OpOverload) -> bool:
    """Return whether an operator with a mode writes one of its arguments in evaluation too (`rrelu_`)."""
    mode, arguments = mode_of(target), target._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return mode is not None and not written <= mode.written


def has_effect(node: Node) -> bool:
    """Return whether a node runs although nothing reads its result. Dropout and attention that evaluate, which torch.fx
    keeps because they may be random, have none."""
    target = node.target
    idle = isinstance(target, OpOverload) and evaluates(node) and not writes_in_evaluation(target)
    return node.is_impure() and not idle


def _written_in_training(target: OpOverload, names: list[str]) -> frozenset[str]:
    in_place = {"self"} if target._schema.name.endswith("dropout_") else set()
    returned = {result.name for result in target._schema.returns}
    kept = {name for name in (*_STATISTICS, "noise") if name in names and f"{name}_out" not in returned}
    return frozenset(in_place | kept)
