"""Load a GGUF file as a model of transformers: its MXFP4 weights as codes, or all weights as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.build_model import skeleton_of, with_tensors
from pt2mx.pt2e.checkpoints.gguf_blocks import BLOCK_TYPES
from pt2mx.pt2e.checkpoints.gguf_file import DTYPES, GGUFFile
from pt2mx.pt2e.checkpoints.gguf_model import ARCHITECTURE, ROPE_TENSORS, architecture_of, config_of
from pt2mx.pt2e.checkpoints.gguf_names import sources_of
from pt2mx.pt2e.checkpoints.layouts import Layout, Stored
from pt2mx.pt2e.checkpoints.module_schemes import Rules, Scheme, Schemes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: types whose codes go into a program unchanged
KEPT = ("MXFP4",)
#: the layout of a GGUF file, whose tensors have names of transformers
GGUF = Layout(
    "gguf", {BLOCK_TYPES[name].element: Stored("_packed", "_scale") for name in KEPT}, dtypes=tuple(DTYPES.values())
)


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a GGUF file by their names in a checkpoint of transformers.

    A weight whose codes are kept is there as `<name>_packed` and `<name>_scale`.

    Args:
        file: the file.
        model: the model that it holds, on any device, also meta.
        keep_codes: True for codes of MXFP4 weights; False: all tensors are values.

    Raises:
        MXError: where the file lacks a tensor of the model, or holds one that the model has not.
    """

    def __init__(self, file: GGUFFile, model: PreTrainedModel, keep_codes: bool) -> None:
        self._file, self._sources = file, sources_of(model, file.text(ARCHITECTURE))
        read = {source.name for source in self._sources.values()}
        for part, source in self._sources.items():
            if source.name not in file.entries:
                raise MXError(
                    f"{str(file.path)!r} lacks {source.name}, which the model has as {part}: convert it again"
                )
        if unknown := sorted(file.entries.keys() - read - {*ROPE_TENSORS}):
            raise MXError(
                f"{str(file.path)!r} holds {unknown[0]}, which {type(model).__name__} has not: give the checkpoint of "
                "Hugging Face"
            )
        kept = KEPT if keep_codes else ()
        #: tensor of the checkpoint -> the type of its codes
        self.packed = {
            part: BLOCK_TYPES[file.entries[source.name].type]
            for part, source in self._sources.items()
            if file.entries[source.name].type in kept
        }
        self._names = {
            name: part
            for part in self._sources
            for name in (GGUF.names(part, self.packed[part].element) if part in self.packed else (part,))
        }
        #: the dtypes of codes and scales by name
        self.dtypes = {name: torch.uint8 for name, part in self._names.items() if part in self.packed}

    def __getitem__(self, name: str) -> Tensor:
        part = self._names[name]
        source = self._sources[part]
        if part not in self.packed:
            values = source.read(self._file.values(source.name))
            return values - source.offset if source.offset else values
        # of many experts only one is read
        blocks = source.read(self._file.blocks(source.name))
        pair = self.packed[part].to_codes(source.name, blocks)
        return pair[GGUF.names(part, self.packed[part].element).index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def has_codes(path: Path) -> bool:
    """Return True for a file with weights whose codes are kept."""
    return any(entry.type in KEPT for entry in GGUFFile(path).entries.values())


def packed_gguf(path: Path) -> tuple[PreTrainedModel, Schemes, GGUFTensors, dict[str, int]]:
    """Return the model without its weights, and of the file its schemes, its tensors and their numbers of values."""
    file, skeleton = _open(path)
    tensors = GGUFTensors(file, skeleton, keep_codes=True)
    # experts are looked up by the names of their tensors, other weights by those of their modules
    rules: Rules = [(partial(_is_of, part), Scheme(row.element)) for part, row in tensors.packed.items()]
    tied = skeleton.all_tied_weights_keys or {}
    sizes = {name: parameter.numel() for name, parameter in skeleton.named_parameters() if name not in tied}
    return skeleton, Schemes(GGUF, rules), tensors, sizes


def load_float_gguf(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the causal language model of a file with the values of its weights.

    Args:
        path: the file.
        dtype: the dtype to load it in; None: the half type of its floats, or float32 where it has other types.

    Raises:
        MXError: where the file cannot be read or holds an architecture or types that are not supported.
    """
    file, skeleton = _open(path)
    tensors = GGUFTensors(file, skeleton, keep_codes=False)
    return with_tensors(skeleton, dtype or skeleton.dtype, tensors, f"{str(path)!r} holds another model")


def _is_of(part: str, name: str, kind: str) -> bool:
    return name in (part, part.rpartition(".")[0])


def _open(path: Path) -> tuple[GGUFFile, PreTrainedModel]:
    file = GGUFFile(path)
    architecture_of(file)
    return file, skeleton_of(config_of(file), str(path))
