"""Write a converted language model as a GGUF file: weights in `BLOCK_TYPES` with their codes, others as floats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx.pt2e.checkpoints.contents import build_tensors
from pt2mx.pt2e.checkpoints.gguf_contents import TensorsInMemory, file_tensors
from pt2mx.pt2e.checkpoints.gguf_write import header_of, write_tensors
from pt2mx.pt2e.files.output import check_output, whole_file
from pt2mx.pt2e.models.gguf_file import SUFFIX
from pt2mx.pt2e.models.gguf_tensors import GGUF

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the suffixes of a weight's tensors
_SUFFIXES = {"", *(name for form in GGUF.stored for name in GGUF.names("", form))}


def save_gguf(
    graph: GraphModule, model: PreTrainedModel, path: str | os.PathLike[str], unpack: Sequence[str], tokenizer: Any
) -> None:
    """Write a GGUF file. It appears complete or not at all.

    Args:
        graph: the converted model.
        model: the float model that was converted, on any device, also meta.
        path: the file; its name ends in ".gguf".
        unpack: regular expressions of modules whose weights are written as dequantized values.
        tokenizer: the tokenizer, or a `GGUFFile` to copy it from; None: the file has no vocabulary.

    Raises:
        MXError: for a model that GGUF cannot hold, or that it would describe as another; nothing is written then.
    """
    check_output(path, (SUFFIX,))
    tensors = build_tensors(graph, model, GGUF, unpack).tensors
    stored = file_tensors(model, TensorsInMemory(_tied_once(model, tensors)))
    header = header_of(model.config, stored, tokenizer)
    with whole_file(path) as file:
        write_tensors(file, header, stored)


def _tied_once(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the second name of tied weights, unless they differ."""
    for name, other in (model.all_tied_weights_keys or {}).items():
        pairs = [(name + suffix, other + suffix) for suffix in _SUFFIXES]
        same = [pair for pair in pairs if pair[0] in tensors and pair[1] in tensors]
        if same and all(torch.equal(tensors[one], tensors[two]) for one, two in same):
            tensors = {key: tensor for key, tensor in tensors.items() if key not in dict(same)}
    return tensors
