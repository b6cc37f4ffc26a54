"""Write a converted language model as a GGUF file: its MXFP4 weights with their codes, others as floats."""

from __future__ import annotations

import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.contents import build_tensors
from pt2mx.pt2e.checkpoints.gguf_blocks import BLOCK_TYPES
from pt2mx.pt2e.checkpoints.gguf_file import DTYPES, SUFFIX
from pt2mx.pt2e.checkpoints.gguf_metadata import add_metadata, architecture_named, check_config, rope_tensors
from pt2mx.pt2e.checkpoints.gguf_names import Source, sources_of
from pt2mx.pt2e.checkpoints.gguf_tensors import GGUF, KEPT
from pt2mx.pt2e.checkpoints.gguf_tokenizer import add_tokenizer
from pt2mx.pt2e.output import check_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TYPES = {dtype: name for name, dtype in DTYPES.items()}
#: matrices that llama.cpp reads in float32 only
_FLOAT32 = ("ffn_gate_inp.weight",)
_TYPE_OF = {BLOCK_TYPES[name].element: BLOCK_TYPES[name] for name in KEPT}


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
    gguf = import_extra("gguf", "gguf")
    check_output(path, (SUFFIX,))
    architecture = architecture_named(model.config)
    tensors, _, _ = build_tensors(graph, model, GGUF, unpack)
    stored = {**_stored(model, architecture, tensors), **rope_tensors(model.config)}
    target = Path(os.path.realpath(path))
    written = target.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    writer = gguf.GGUFWriter(written, architecture)
    try:
        add_metadata(writer, model.config)
        add_tokenizer(writer, tokenizer, model.config.get_text_config().vocab_size)
        kinds = Counter(kind for kind, tensor in stored.values() if tensor.dim() > 1)
        writer.add_file_type(_file_type(gguf, kinds.most_common(1)[0][0]))
        for name, (kind, tensor) in stored.items():
            writer.add_tensor(name, _array(tensor), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check_config(written, model.config)
        os.replace(written, target)
    except OSError as error:
        raise MXError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        writer.close()
        written.unlink(missing_ok=True)


def _stored(model: PreTrainedModel, architecture: str, tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Return tensor of the file -> its type, and its values or blocks."""
    tied = model.all_tied_weights_keys or {}
    for name, other in tied.items():
        pairs = [(name + suffix, other + suffix) for suffix in ("", *GGUF.names("", next(iter(GGUF.stored))))]
        same = [pair for pair in pairs if pair[0] in tensors and pair[1] in tensors]
        if same and all(torch.equal(tensors[one], tensors[two]) for one, two in same):
            tensors = {key: tensor for key, tensor in tensors.items() if key not in dict(same)}
    parts: dict[str, list[tuple[Source, str, Tensor]]] = defaultdict(list)
    for part, source in sources_of(model, architecture, untied=True).items():
        if any(name in tensors for name in (part, *GGUF.names(part, next(iter(GGUF.stored))))):
            parts[source.name].append((source, *_ordered(part, source, tensors)))
    stored = {}
    for name, pieces in parts.items():
        kinds = {kind for _, kind, _ in pieces}
        if len(kinds) > 1:
            raise MXError(f"GGUF holds the experts {name} in one type: they are in {' and '.join(sorted(kinds))}")
        pieces.sort(key=lambda piece: piece[0].expert or 0)
        whole = torch.stack([tensor for *_, tensor in pieces]) if pieces[0][0].expert is not None else pieces[0][2]
        stored[name] = kinds.pop(), whole
    return stored


def _ordered(part: str, source: Source, tensors: dict[str, Tensor]) -> tuple[str, Tensor]:
    """Return the type of a tensor, and its values or blocks with the rows in the file's order."""
    for element, row in _TYPE_OF.items():
        data, scale = GGUF.names(part, element)[:2]
        if data in tensors:
            return row.name, source.order(row.to_blocks(part, tensors[data], tensors[scale]))
    values = tensors[part].detach()
    if values.dim() == 1 or source.name.endswith(_FLOAT32):
        values = values.float()
    values = source.order(values)
    return _TYPES[values.dtype], values + source.offset if source.offset else values


def _array(tensor: Tensor) -> Any:
    """Return NumPy's array, of bytes for bfloat16."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _file_type(gguf: Any, kind: str) -> int:
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    return int(gguf.LlamaFileType[names.get(kind, f"MOSTLY_{kind}")])
