"""Fold rotations into the weights of a decoder: of the residual stream, and of the values of attention in each head.

The program computes the same afterwards, without a new node. Names and shapes stay; an embedding and a head that were
tied become two weights.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.algorithms import Rotation
from pt2mx.errors import MXError
from pt2mx.fx.graph.constants import evaluate
from pt2mx.fx.graph.node import free_name, name_of, shape_of, tensor_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors, delete_unused_tensors
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.flow.sizes import FLOAT_SIZE_KEY, float_size
from pt2mx.pt2e.optimize.losses import call_with_batch
from pt2mx.pt2e.optimize.rotated_values import Change, RotatedValues, attention_values, readers_of, refuse

#: meta key of an operator: the number of values that are rotated together in its weight
ROTATED_KEY = "mx_rotated"
#: fewest values that are rotated together
_SMALLEST = 4
#: allowed error of outputs in float32, and in 16 bits, relative to their norm. SmolLM2-135M in bfloat16 differs from
#: itself with rotations by 0.01 to 0.03; without the change of one of its weights, by 0.04 to 0.4
_AGREEMENT, _AGREEMENT_OF_16_BITS = 1e-3, 0.1


@torch.no_grad()
def fold_rotations(model: GraphModule, options: Rotation, example: Any = None) -> GraphModule:
    """Return a copy of a float program in which rotations are folded into the weights.

    Args:
        model: an exported decoder.
        options: with the largest size of a block; with `strict=False` a program whose weights cannot hold rotations is
            returned as it is, with a warning.
        example: a batch, on which the result must compute what the program computes; None: nothing is compared.

    Raises:
        MXError: for a program whose residual stream cannot be rotated, with the operator that prevents it; and for a
            result that computes something else.
    """
    try:
        return _folded(model, options, example)
    except MXError as error:
        if options.strict:
            raise
        warnings.warn(f"the weights stay without rotations: {error}", stacklevel=2)
        return model


def _folded(model: GraphModule, options: Rotation, example: Any) -> GraphModule:
    result = copy_sharing_tensors(model)
    result.meta[FLOAT_SIZE_KEY] = float_size(model)  # a head that was tied gets a weight of its own
    embedding = _embedding(result)
    rotated = [RotatedValues(embedding, _size(embedding, options))]
    for values in attention_values(result.graph.nodes):
        if not any(values in others.gains for others in rotated):
            with suppress(MXError):  # such as values that a gate multiplies: they stay
                rotated.append(RotatedValues(values, _size(values, options)))
    gain_weights = {gain: weight for values in rotated for gain, weight in values.gain_weights().items()}
    gains = {gain: evaluate(result, gain).float() for gain in gain_weights}
    for gain, weight in gain_weights.items():
        _make_neutral(result, gain, weight)
    changes = [change for values in rotated for change in values.changes]
    for weight, of_weight in _grouped(changes, lambda change: change.weight).items():
        _change_weight(result, weight, of_weight, gains)
    for node in result.graph.find_nodes(op="get_attr"):
        if not node.users:
            result.graph.erase_node(node)
    delete_unused_tensors(result)  # other names of a tied weight keep its old value
    result.recompile()
    if example is not None:
        _compare(model, result, example)
    return result


def _embedding(model: GraphModule) -> Node:
    for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        return node
    raise MXError(
        "the program looks up no embedding: rotations are folded into the weights of decoders: leave "
        "Rotation(online=False) out"
    )


def _size(node: Node, options: Rotation) -> int:
    """Return the largest power of two, up to the size of the options, that divides the rows of a node."""
    width = (shape_of(node) or (0,))[-1]
    size = min(options.size or width, width & -width) if isinstance(width, int) else 0
    if size < _SMALLEST:
        refuse(node, f"has rows of {width} values, which no block of {_SMALLEST} or more divides")
    return size


def _grouped(changes: list[Change], key: Callable[[Change], Node]) -> dict[Node, list[Change]]:
    groups: dict[Node, list[Change]] = defaultdict(list)
    for change in changes:
        groups[key(change)].append(change)
    return groups


def _make_neutral(model: GraphModule, gain: Node, weight: Node) -> None:
    """Set the weight of a norm so that its gain is one: to ones, or to zeros where the norm adds one."""
    old = tensor_of(model, weight)
    for fill in (torch.ones_like, torch.zeros_like):
        _set(model, name_of(weight), fill(old))
        if evaluate(model, gain).eq(1).all():
            return
    refuse(gain, "computes a gain that no weight makes one")


def _change_weight(model: GraphModule, weight: Node, changes: list[Change], gains: dict[Node, Tensor]) -> None:
    """Replace a weight by its changed value; where its readers need several values, by a weight for each."""
    old, readers = tensor_of(model, weight), readers_of(weight)
    by_reader = _grouped(changes, lambda change: change.reader)
    values = {reader: _changed(old, of_reader, gains) for reader, of_reader in by_reader.items()}
    first = values[changes[0].reader]
    others_read_it = set(readers) != set(values)
    if not others_read_it and all(torch.equal(value, first) for value in values.values()):
        _set(model, name_of(weight), first)
    else:
        for reader, value in values.items():
            path, attribute = module_name(by_reader[reader][0].layer), name_of(weight).rpartition(".")[2]
            if path not in dict(model.named_modules()):  # a tied weight had the name of another module alone
                model.add_submodule(path, nn.Module())
            owner = model.get_submodule(path)
            if others_read_it or getattr(owner, attribute, None) is not old:
                attribute = free_name(owner, attribute)
            owner.register_parameter(attribute, nn.Parameter(value, old.requires_grad))
            with model.graph.inserting_before(weight):
                node = model.graph.get_attr(f"{path}.{attribute}".removeprefix("."))
            node.meta.update(weight.meta)
            reader.replace_input_with(weight, node)
    for change in changes:
        change.layer.meta[ROTATED_KEY] = max(change.size, change.layer.meta.get(ROTATED_KEY, 0))


def _changed(weight: Tensor, changes: list[Change], gains: dict[Node, Tensor]) -> Tensor:
    """Return the value of a weight after changes, computed in float32.

    Raises:
        MXError: where it overflows.
    """
    value = weight.to(torch.float32, copy=True)
    for change in changes:
        columns = value.movedim(change.axis, -1)
        if change.gain is not None:
            columns.mul_(gains[change.gain])
        first, length = change.part or (0, columns.shape[-1])
        part = columns.narrow(-1, first, length)
        part.copy_(hadamard(part, change.size, -1))
    changed = value.to(weight.dtype)
    if weight.isfinite().all() and not changed.isfinite().all():
        refuse(changes[0].layer, f"would overflow {weight.dtype}")
    return changed


def _set(model: GraphModule, name: str, value: Tensor) -> None:
    """Replace the tensor of this name; other names of the same tensor keep it."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    old = getattr(owner, attribute)
    is_parameter = isinstance(old, nn.Parameter)
    setattr(owner, attribute, nn.Parameter(value, old.requires_grad) if is_parameter else value)


def _compare(before: GraphModule, after: GraphModule, example: Any) -> None:
    """Raise an `MXError` if two programs give other outputs on a batch, beyond rounding."""
    expected_outputs, outputs = (pytree.tree_leaves(call_with_batch(model, example)) for model in (before, after))
    in_16_bits = any(parameter.dtype != torch.float32 for parameter in before.parameters())
    for expected, value in zip(expected_outputs, outputs, strict=True):
        if not isinstance(expected, Tensor) or not expected.is_floating_point() or not expected.numel():
            continue
        rows, others = (one.float().reshape(-1, (1, *one.shape)[-1]) for one in (expected, value))
        errors = (others - rows).norm(dim=-1) / rows.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        # in 16 bits, rounding in another order changes the experts of some tokens
        error = float(errors.quantile(0.25) if in_16_bits else errors.max())
        if not error < (_AGREEMENT_OF_16_BITS if in_16_bits else _AGREEMENT):
            raise MXError(
                f"with rotations folded into its weights the program gives other outputs ({error:.2g} of their norm): "
                "leave Rotation(online=False) out"
            )
