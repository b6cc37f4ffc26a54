"""The `transform_config` of compressed-tensors: matrices that multiply inputs, outputs and weights of modules.

A group has one kind of matrix, and says where it is applied. The weights of a file are multiplied already, so that only
"input" and "output" are left to do as the model runs. `save_checkpoint` writes the inputs that `hadamard` rotates. Its
matrix has signs that Sylvester's, the type "hadamard", has not, so that each module holds it ("random-hadamard").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.models.checkpoint_names import stored_parts
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import (
    EXPERTS,
    LINEAR,
    Matches,
    Module,
    Schemes,
    Transform,
    by_class,
    by_name,
    weights_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG = "transform_config"
#: type of a group -> True where the checkpoint holds its matrix
_TYPES = {"hadamard": False, "random-hadamard": True}
_IN_WEIGHTS = ("weight_input", "weight_output")
_AS_IT_RUNS = ("input", "output")


def write(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the entry of the configuration: one group a size of blocks; empty where no inputs are rotated."""
    sizes = sorted({module.rotated for module in modules.values() if module.rotated})
    groups = {_group(size): _written(size, modules) for size in sizes}
    return {_CONFIG: {"config_groups": groups}} if groups else {}


def tensors(module: str, size: int) -> dict[str, Tensor]:
    """Return the tensors of a module whose inputs are rotated, by name."""
    return {f"{module}.{_group(size)}_input.weight": matrix_of(size)}


def matrix_of(size: int) -> Tensor:
    """Return the matrix, (size, size) of 1 and -1, with which `hadamard` multiplies a block times its square root."""
    return hadamard(torch.eye(size), size, -1).sign()


def read(config: Mapping[str, Any]) -> tuple[Transform, ...]:
    """Return what a configuration multiplies as the model runs.

    Raises:
        MXError: for other matrices, for queries and keys, and for an entry that is none.
    """
    transforms = []
    for group, fields in _mapping(_mapping(config.get(_CONFIG) or {}).get("config_groups") or {}).items():
        for where in _mapping(fields).get("apply") or ():
            if _mapping(where).get("location") not in _IN_WEIGHTS:
                transforms.append(_transform(group, fields, where))
    return tuple(transforms)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MXError(f"{value!r} in transform_config is no mapping: give the entry that compressed-tensors wrote")
    return value


def matrices(model: PreTrainedModel, schemes: Schemes, tensors: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    """Return what multiplies inputs or outputs as a model runs, in the order in which compressed-tensors applies it.

    Args:
        model: the model, on any device, also meta.
        schemes: what the configuration states.
        tensors: the tensors of the checkpoint. It may have a matrix once for all modules of a group.

    Returns:
        Module, location, and the matrix, (size, size) float32, that multiplies each block of its rows.

    Raises:
        MXError: for modules other than linear layers, for none, and for matrices that the checkpoint lacks.
    """
    multiplied: list[tuple[str, str, Tensor]] = []
    shared: dict[tuple[str, int, bool], Tensor] = {}
    names = _names(model, schemes.layout) if schemes.transforms else {}
    for transform in schemes.transforms:
        paths = [path for path in names if transform.changes(names[path])]
        if not paths:
            raise MXError(
                f"{transform.group} of transform_config multiplies the {transform.location} of no module of the model: "
                "give files that belong together"
            )
        for path in paths:
            module = model.get_submodule(path)
            if not isinstance(module, nn.Linear):
                raise MXError(
                    f"{transform.group} of transform_config multiplies the {transform.location} of {path}, a "
                    f"{type(module).__name__}, which pt2mx does not read: expected linear layers"
                )
            length = module.in_features if transform.location == "input" else module.out_features
            values = _matrix(transform, names[path][-1][0], length, tensors)
            same = shared.setdefault((transform.group, len(values), transform.inverse), values)
            multiplied.append((path, transform.location, same if values.equal(same) else values))
    return multiplied


def _names(model: PreTrainedModel, layout: Layout) -> dict[str, list[tuple[str, str]]]:
    """Return module -> its names, each with the name of a class; the last one is its name in the checkpoint."""
    names = {path: [(path, kind.__name__) for kind in type(module).__mro__] for path, module in model.named_modules()}
    for weight, kind in weights_of(model).items():
        for part in stored_parts(model, weight, layout) or ():
            of_part = part.rpartition(".")[0], LINEAR if kind == EXPERTS else kind
            names[weight.rpartition(".")[0]].append(of_part)
    return names


def _matrix(transform: Transform, module: str, length: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix of a module, by its name in the checkpoint, whose rows have a length."""
    size = transform.size or length
    what = f"{transform.name} of {module}"
    if length % size:
        raise MXError(f"{what} (transform_config) has blocks of {size}, which do not divide {length} values")
    if transform.is_stored:
        values = _stored(transform, module, "weight", size, tensors)
        if values is None:
            raise MXError(f"the checkpoint holds no {module}.{transform.name}.weight of {size} x {size} values")
        values = values.float()
    elif size & (size - 1):
        raise MXError(f"{what} (transform_config) is a Hadamard matrix of {size} values, no power of two")
    else:
        values = _sylvester(size)
    order = _stored(transform, module, "perm", size, tensors)
    values = values if order is None else values[order][:, order]
    return (values.mT if transform.inverse else values) * size**-0.5


def _group(size: int) -> str:
    return f"rotation_{size}"


def _written(size: int, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write a group by the names of its modules: engines have linear layers that the configuration does not name."""
    targets = [name for name, module in modules.items() if module.rotated == size]
    applied = [
        {"targets": targets, "location": location, "inverse": inverse}
        for location, inverse in (("input", False), ("weight_input", True))
    ]
    return {"type": "random-hadamard", "head_dim": size, "apply": applied}


def _transform(group: str, fields: Mapping[str, Any], where: Mapping[str, Any]) -> Transform:
    kind, size, location = fields.get("type"), fields.get("head_dim"), where.get("location")
    if location not in _AS_IT_RUNS:
        raise MXError(
            f"{group} of transform_config has the location {location!r}, which pt2mx does not read: expected "
            f"{', '.join((*_AS_IT_RUNS, *_IN_WEIGHTS))}"
        )
    if kind not in _TYPES:
        raise MXError(
            f"{group} of transform_config has the type {kind!r}, which pt2mx does not read: expected "
            f"{' or '.join(_TYPES)}"
        )
    if size is not None and (not isinstance(size, int) or size < 1):
        raise MXError(f"{group} of transform_config has blocks of {size!r} (head_dim): expected a number of values")
    targets, ignored = (_matches(where.get(key) or []) for key in ("targets", "ignore"))
    inverse = bool(where.get("inverse"))
    return Transform(group, location, targets, ignored, size, inverse, _TYPES[kind])


def _matches(names: str | list[str]) -> tuple[Matches, ...]:
    listed = [names] if isinstance(names, str) else names
    return tuple(matches(name) for name in listed for matches in (by_name, by_class))


def _stored(transform: Transform, module: str, kind: str, size: int, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return a tensor of a module, or of any module in its group, with blocks of the same size; None: there is none."""
    own = f"{module}.{transform.name}.{kind}"
    if own not in tensors:
        ends = tuple(f".{transform.group}_{location}.{kind}" for location in _AS_IT_RUNS)
        shared = (tensors[name] for name in tensors if name.endswith(ends))
        return next((tensor for tensor in shared if len(tensor) == size), None)
    if len(tensors[own]) != size:
        raise MXError(f"{own} has the shape {(*tensors[own].shape,)}: expected blocks of {size}")
    return tensors[own]


def _sylvester(size: int) -> Tensor:
    values = torch.ones(1, 1)
    while len(values) < size:
        values = torch.cat((torch.cat((values, values), 1), torch.cat((values, -values), 1)))
    return values
