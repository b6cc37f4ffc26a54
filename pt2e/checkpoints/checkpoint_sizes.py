"""The number of values of each tensor of a checkpoint, as its files say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.checkpoint_files import INDEX, WHOLE, read_json
from pt2mx.pt2e.checkpoints.safetensors_shards import ShardReader

#: the files of a checkpoint that transformers looks for, in its order
_FILES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def files_of(name: str | os.PathLike[str]) -> list[Path]:
    """Return the files with the tensors of a checkpoint, after transformers has loaded it.

    Args:
        name: a folder, or a name on the hub, whose files are in the cache.

    Returns:
        The files; none where the tensors are in files of another kind.
    """
    hub = import_extra("transformers.utils.hub", "hf")
    for file in _FILES:
        quiet = dict.fromkeys(("connection_errors", "gated_repo", "missing_entries"), False)
        options = {f"_raise_exceptions_for_{what}": value for what, value in quiet.items()}
        if found := hub.cached_file(os.fspath(name), file, local_files_only=True, **options):
            shards = sorted(set(read_json(Path(found))["weight_map"].values())) if file.endswith(".json") else [file]
            return [Path(found).parent / shard for shard in shards]
    return []


def sizes_in(files: Iterable[str | os.PathLike[str]]) -> dict[str, int]:
    """Return the number of values of each tensor of floating point, or of codes.

    Args:
        files: of safetensors, or what torch saved; values are not read.
    """
    shapes: dict[str, tuple[torch.dtype, int]] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            with ShardReader(file) as reader:
                shapes |= {name: (entry.dtype, entry.values) for name, entry in reader.entries.items()}
        else:
            held = torch.load(file, map_location="meta", mmap=True, weights_only=True)
            shapes |= {name: (tensor.dtype, tensor.numel()) for name, tensor in held.items()}
    return {name: size for name, (dtype, size) in shapes.items() if dtype.is_floating_point or dtype == torch.uint8}
