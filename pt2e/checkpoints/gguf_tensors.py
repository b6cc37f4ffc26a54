"""Load a GGUF file as a model of transformers: weights in `BLOCK_TYPES` as codes, or all weights as values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.functional import dequantize_mx
from pt2mx.pt2e.checkpoints.build_model import skeleton_of, with_tensors
from pt2mx.pt2e.checkpoints.gguf_blocks import BLOCK_TYPES, NVFP4_TYPE
from pt2mx.pt2e.checkpoints.gguf_file import DTYPES, GGUFFile
from pt2mx.pt2e.checkpoints.gguf_model import ARCHITECTURE, ROPE_TENSORS, architecture_of, config_of
from pt2mx.pt2e.checkpoints.gguf_names import Source, sources_of
from pt2mx.pt2e.checkpoints.layouts import Layout, Stored
from pt2mx.pt2e.checkpoints.module_schemes import Rules, Scheme, Schemes
from pt2mx.pt2e.checkpoints.weight_formats import read_tensor_scale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the layout of a GGUF file, whose tensors have names of transformers
GGUF = Layout(
    "gguf",
    {
        row.form: Stored(
            f"_{row.name.lower()}",
            "_scale",
            scale_dtype=row.spec.scale_format.dtype,
            tensor_scale="_tensor_scale" if row.spec.scale_format.tensor else "",
        )
        for row in BLOCK_TYPES.values()
    },
    dtypes=tuple(DTYPES.values()),
)


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a GGUF file by their names in a checkpoint of transformers.

    A weight whose codes are kept is there as `<name>_mxfp4` (or the name of another type) and `<name>_scale`, in NVFP4
    also as `<name>_tensor_scale`.
    A weight of the model that is made of tensors of several types becomes values.

    Args:
        file: the file.
        model: the model that it holds, on any device, also meta.
        keep_codes: True for codes of weights in `BLOCK_TYPES`; False: all tensors are values.

    Raises:
        MXError: where the file lacks a tensor of the model, or holds one that the model has not.
    """

    def __init__(self, file: GGUFFile, model: PreTrainedModel, keep_codes: bool) -> None:
        self._file, self._sources = file, sources_of(model, file.text(ARCHITECTURE))
        read = {name for source in self._sources.values() for name in (source.name, *source.scales)}
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
        types: dict[str, set[str]] = defaultdict(set)
        for source in self._sources.values():
            entry = file.entries[source.name]
            types[source.parameter].add(entry.type if len(entry.shape) > 1 else "values")
        #: tensor of the checkpoint -> the type of its codes
        self.packed = {
            part: BLOCK_TYPES[file.entries[source.name].type]
            for part, source in self._sources.items()
            if keep_codes and len(types[source.parameter]) == 1 and types[source.parameter] <= BLOCK_TYPES.keys()
        }
        #: the dtypes of codes and scales by name
        self.dtypes: dict[str, torch.dtype] = {}
        self._names: dict[str, str] = {}
        for part in self._sources:
            if part not in self.packed:
                self._names[part] = part
                continue
            form = self.packed[part].form
            names, stored = GGUF.names(part, form), GGUF.stored[form]
            self._names |= dict.fromkeys(names, part)
            self.dtypes |= dict(zip(names, (stored.dtype, stored.scale_dtype, torch.float32), strict=False))

    def __getitem__(self, name: str) -> Tensor:
        part = self._names[name]
        source = self._sources[part]
        # of many experts only one is read
        blocks = source.read(self._file.blocks(source.name))
        if part in self.packed:
            row = self.packed[part]
            names = GGUF.names(part, row.form)
            if name == names[-1] and row.spec.scale_format.tensor:
                return self._tensor_scale(source)
            return row.to_codes(source.name, blocks)[names.index(name)]
        if self._file.entries[source.name].type == NVFP4_TYPE:
            row = BLOCK_TYPES[NVFP4_TYPE]
            data, scale = row.to_codes(source.name, blocks)
            return dequantize_mx(data, scale, row.spec, tensor_scale=self._tensor_scale(source))
        values = self._file.values_of(source.name, blocks)
        return values - source.offset if source.offset else values

    def _tensor_scale(self, source: Source) -> Tensor:
        """Return the scale of a tensor in NVFP4, () float32; a file without it means 1."""
        name = source.scales[0]
        if name not in self._file.entries:
            return torch.ones(())
        return read_tensor_scale(name, self._file.values(name).view(-1)[source.expert or 0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def has_codes(path: Path) -> bool:
    """Return True for a file with weights whose codes are kept."""
    return any(entry.type in BLOCK_TYPES for entry in GGUFFile(path).entries.values())


def packed_gguf(path: Path) -> tuple[PreTrainedModel, Schemes, GGUFTensors, dict[str, int]]:
    """Return the model without its weights, and of the file its schemes, its tensors and their numbers of values."""
    file, skeleton = _open(path)
    tensors = GGUFTensors(file, skeleton, keep_codes=True)
    # experts are looked up by the names of their tensors, other weights by those of their modules
    rules: Rules = [(partial(_is_of, part), Scheme(row.form)) for part, row in tensors.packed.items()]
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
