"""Convert a checkpoint to a GGUF file, tensor by tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.convert_shards import ShardConverter
from pt2mx.pt2e.checkpoints.gguf_contents import file_tensors
from pt2mx.pt2e.checkpoints.gguf_write import header_of, write_tensors
from pt2mx.pt2e.checkpoints.recoding import RecodingPlan
from pt2mx.pt2e.checkpoints.sources import Source
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.gguf_tensors import GGUF
from pt2mx.pt2e.models.safetensors_shards import Entry
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from pt2mx.pt2e.models.weight_formats import read_tensor_scale


class PlannedContents:
    """The `Contents` that a plan makes of the tensors of a checkpoint, which are read when they are asked for.

    Args:
        converter: the converter of the plan, whose layout is `GGUF`.
    """

    def __init__(self, converter: ShardConverter) -> None:
        self._converter, self._plan = converter, converter.plan
        self._entries: dict[str, Entry] = {}
        self._origins: dict[str, tuple[str, str]] = {}
        for shard, entries in self._plan.entries.items():
            for name, entry in entries.items():
                outputs = self._plan.outputs(name, entry)
                self._entries |= outputs
                self._origins |= dict.fromkeys(outputs, (shard, name))

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def slices(self, name: str) -> Iterator[Tensor]:
        yield from (rows for written, rows in self._written(name, name) if written == name)

    def codes(self, names: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        read = {}
        for written, rows in self._written(names[0], _part(names)):
            read[written] = rows
            if written == names[1]:  # scales follow codes
                yield read[names[0]], rows

    def tensor_scale(self, names: tuple[str, ...]) -> Tensor:
        scale = next(rows for written, rows in self._written(names[0], _part(names)) if written == names[2])
        return read_tensor_scale(names[2], scale)

    def _written(self, name: str, part: str) -> Iterator[tuple[str, Tensor]]:
        shard, source = self._origins[name]
        if isinstance(self._plan, RecodingPlan) and source in self._plan.regroupings:
            yield from ((written, rows) for written, _, rows in self._plan.recoded(source, part))
            return
        with self._plan.shards.open(shard) as reader:
            yield from ((written, rows) for written, _, rows in self._converter.written(reader, source))


def _part(names: tuple[str, ...]) -> str:
    """Return the name of the weight with these tensors."""
    return names[1].removesuffix(next(iter(GGUF.stored.values())).scale)


def convert_to_gguf(
    source: Source,
    converter: ShardConverter,
    path: Path,
    origin: str,
    finished: Callable[[str, int], None] = lambda name, count: None,
) -> list[str]:
    """Write a GGUF file. It appears complete or not at all.

    An interrupted run leaves a hidden file, which a second call continues.

    Args:
        source: the checkpoint.
        converter: the converter of its plan.
        path: the file.
        origin: a text that changes whenever the tensors do.
        finished: called with each finished tensor and the number of tensors.

    Returns:
        The tensors that an earlier run had written.

    Raises:
        MXError: for a model that GGUF cannot hold, or that it would describe as another; for an unfinished file of
            another conversion.
    """
    tensors = file_tensors(source.model, PlannedContents(converter))
    tokenizer = load_tokenizer(source.path) if gguf_in(source.path) is None else GGUFFile(source.path)
    header = header_of(source.model.config, tensors, tokenizer)
    target = Path(os.path.realpath(path))
    digest = hashlib.sha256(header + origin.encode()).hexdigest()[:16]
    unfinished = target.with_name(f".{target.name}.{digest}.partial")
    if others := [one for one in target.parent.glob(f".{target.name}.*.partial") if one != unfinished]:
        raise MXError(
            f"{str(others[0])!r} is an unfinished conversion with other settings or of another checkpoint: remove it"
        )
    try:
        unfinished.touch()
        with open(unfinished, "r+b") as file:
            kept = write_tensors(file, header, tensors, lambda name: finished(name, len(tensors)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except MXError:  # it would fail again
        unfinished.unlink(missing_ok=True)
        raise
    return kept
