"""Measure the share of a checkpoint's values that a program holds, by top-level module; refuse to lose a part."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.export import ExportedProgram

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.models.checkpoint_names import no_values, renames_of
from pt2mx.pt2e.models.module_schemes import tied_names
from pt2mx.pt2e.models.safetensors_shards import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: heads that consist of whole layers: they predict the tokens after the next one
_HEADS_OF_LAYERS = ("mtp", "mtp_layers")
#: buffers that older versions of transformers saved and every model now computes
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
#: dtypes of masks and of indices, which some checkpoints hold next to the weights
_NO_WEIGHTS = (torch.bool, torch.int64)


class Share(NamedTuple):
    """The values of a module that the program holds, all its values, and the number of its tensors."""

    held: int
    values: int
    tensors: int


@dataclass(frozen=True)
class Coverage:
    """The share of a checkpoint's values that a program, or a model, holds.

    Args:
        modules: top-level module -> its share.
        lost: top-level module -> the tensors that are left out, except unused heads.
        read: the tensors of the model that the program reads.
        codes: tensors that are not held, because the model takes their codes or integers for values.
    """

    modules: Mapping[str, Share]
    lost: Mapping[str, list[str]]
    read: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()

    @property
    def values(self) -> int:
        """All values of the checkpoint."""
        return sum(share.values for share in self.modules.values())

    @property
    def held(self) -> int:
        """The values that the program holds."""
        return sum(share.held for share in self.modules.values())

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        modules = {name: {"held": share.held, "values": share.values} for name, share in self.modules.items()}
        return {"held": self.held, "values": self.values, "modules": modules}

    def __str__(self) -> str:
        text = f"{_percent(self.held, self.values)} of the checkpoint's {self.values:,} values"
        if self.held == self.values:
            return text
        return f"{text}: " + ", ".join(f"{name} {_percent(*share[:2])}" for name, share in self.modules.items())

    def check(self, part: str | None, allow_partial: bool) -> None:
        """Raise an `MXError` if other parts than unused heads are left out, or codes are taken for values.

        With `part`, a top-level module, all others may be left out; with `allow_partial` any may, and codes are values.
        """
        if part is not None and part not in self.modules:
            raise MXError(f"the model has no top-level module {part!r}: {nearest(part, self.modules)}")
        if self.codes and not allow_partial:
            raise MXError(
                f"the checkpoint holds codes or integers of {min(self.codes)}, which its configuration calls "
                "unconverted: taken for values they are another model; fetch it again, or give --allow-partial "
                "(allow_partial=True) to take them for values"
            )
        lost = dict(self.lost)
        if part is not None:  # it may be an unused head, which `lost` leaves out
            lost = {part: lost.get(part, [part])} if part in lost or not self.modules[part].held else {}
        if allow_partial or not lost:
            return
        first = next(iter(lost.values()))[0]
        whole = [name for name, share in self.modules.items() if share.held == share.values]
        example = max(whole, key=lambda name: self.modules[name].tensors, default="NAME")
        advice = f"give --part {example} (part={example!r}) for a program of that part, or"
        if part is not None:
            advice = f"give a model of {part} alone with inputs that reach it (--model module.py:factory), or"
        raise MXError(
            f"the program would hold {self}; without {first}, for example, it is another model: {advice} "
            "--allow-partial (allow_partial=True) for what there is"
        )


class CheckpointValues:
    """The values of a checkpoint, by the names that its tensors have in a model.

    Args:
        model: the model that loads the checkpoint, on any device, also meta.
        entries: tensor of the checkpoint -> its dtype and shape; None: the parameters of the model.
    """

    def __init__(self, model: PreTrainedModel, entries: Mapping[str, Entry] | None = None) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._known = model.state_dict().keys() | dict(model.named_buffers()).keys()
        self._tied, self._prefix = tied_names(model), f"{model.base_model_prefix}."
        patterns = [*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._sizes: dict[str, int] = defaultdict(int)
        self._rename = renames_of(model)
        self._codes: frozenset[str] = frozenset()
        if entries is None:
            self._sizes |= {name: parameter.numel() for name, parameter in model.named_parameters()}
            return
        codes = no_values(model, {name: entry.dtype for name, entry in entries.items()})
        self._codes = frozenset(self._rename(name)[0] for name in codes)
        for name, entry in entries.items():
            renamed = self._rename(name)[0]
            # the buffers of a model are no weights: a program may compute them itself
            if renamed in parameters or (renamed not in self._known and entry.dtype not in _NO_WEIGHTS):
                self._sizes[renamed] += entry.values

    def is_known(self, name: str) -> bool:
        """Return True for a tensor of the checkpoint that the model has, under this name or another."""
        return self._rename(name)[0] in self._known

    def top_level(self, name: str) -> str:
        """Return the top-level module of a tensor: a child of the base model where there is one, or of the model."""
        return name.removeprefix(self._prefix).partition(".")[0]

    def held_by(self, read: Collection[str] | None = None) -> Coverage:
        """Return the share that a program holds which reads these tensors, by their names in the model; None: all."""
        read = frozenset(self._known if read is None else read)
        held: set[str] = set()
        held_paths: set[str] = set()
        for name in self._sizes.keys() - self._codes:
            if read & {name, *self._tied.get(name, ())}:
                held.add(name)
                held_paths.update(_paths(name))
        modules: dict[str, Share] = {}
        for name, size in self._sizes.items():
            top = self.top_level(name)
            before = modules.get(top, Share(0, 0, 0))
            modules[top] = Share(before.held + size * (name in held), before.values + size, before.tensors + 1)
        lost: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self._sizes.keys() - held):
            if not self._may_be_unused(name, held_paths):
                lost[self.top_level(name)].append(name)
        return Coverage(modules, lost, read, self._codes)

    def _may_be_unused(self, name: str, held_paths: set[str]) -> bool:
        """Return True for a left out tensor of an unused head, and for one that transformers ignores for this model.

        The modules of `held_paths` are held at least in part.
        """
        top = self.top_level(name)
        if top in _HEADS_OF_LAYERS:
            return True
        layers = [path for path in _paths(name) if path.rpartition(".")[2].isdigit() and name.count(".", len(path)) > 1]
        whole_layer = not held_paths.issuperset(layers)
        if name in self._known:  # the program does not read it: it is an unused head, or a layer is missing
            return not whole_layer
        if any(self.top_level(path) == top for path in held_paths) and self._ignored.search(name):
            return True
        return not whole_layer and not layers and name.rpartition(".")[0] not in held_paths


def tensors_read(program: ExportedProgram, prefix: str = "") -> set[str]:
    """Return the parameters and buffers that a program reads, without a prefix of their names."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in names and node.users]
    return {names[node.name].removeprefix(prefix) for node in inputs}


def _paths(name: str) -> list[str]:
    """Return the paths of the modules that contain a tensor, outermost first."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _percent(part: int, whole: int) -> str:
    """Return a percentage that is "100%" only for the whole, and "0%" only for nothing."""
    if part in (0, whole):
        return "100%" if part == whole else "0%"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f}%"
