"""Run the program of a decoder: prompts in chunks and single tokens, each compiled or as an AOTInductor package.

The packages hold machine code only. The weights stay in the folder's program and are passed to each call, so that they
are stored once, on disk and in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.graph_pass import GraphPass, run_passes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import attribute_of, is_ours, tensor_of
from pt2mx.fx.graph.tensors import (
    copy_sharing_tensors,
    delete_unused_tensors,
    generate_code,
    move_to_device,
    without_torch_warnings,
)
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.fx.passes.decoding_attention import store_positions, use_decoding_attention
from pt2mx.fx.passes.fuse_decoding import MOST_FUSED_ROWS, fuse_decoding
from pt2mx.fx.passes.rotate_and_store import fuse_rope
from pt2mx.kernels.select import supports
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import KINDS, OF_TOKENS, DecoderCache, Layers
from pt2mx.pt2e.language.merge_images import FEATURES, ImageInputs
from pt2mx.pt2e.language.recurrence import pass_batch_sizes, with_single_steps
from pt2mx.pt2e.language.signature import free_inputs, set_inputs
from pt2mx.pt2e.packages.package import check_loads

#: tokens of a prompt to read at once: it bounds the memory of attention, and a GPU needs many to be busy
_CHUNK = {"cpu": 1024, "cuda": 4096}
#: on a GPU a compiled program pads prompts to a multiple of this length: each length has a CUDA graph of its own
_LENGTH_MULTIPLE = 128
#: the inputs of a program that say where its tokens are
_POSITIONS = ("position_ids", "attention_mask", "start", "image_positions")
#: package -> the number of tokens that its program reads; None: any
_TOKENS_OF_PACKAGE = {"prompt": None, "token": 1}


class Programs(NamedTuple):
    """The programs for a single token of each of a few and of many sequences; they may be the same."""

    few: Callable[..., Tensor]
    many: Callable[..., Tensor]

    def of(self, batch: int) -> Callable[..., Tensor]:
        """Return the program for a number of sequences."""
        return self.many if batch > MOST_FUSED_ROWS else self.few


def lower_program(program: ExportedProgram, device: torch.device) -> GraphModule:
    """Return the graph of a program, lowered where it has operators of pt2mx, on a device."""
    graph = program.module(check_guards=False)  # the callers check the inputs
    quantized = any(is_ours(node) for one in graph_modules(graph) for node in one.graph.nodes)
    return lower_to_inductor(graph, device) if quantized else move_to_device(graph, device)


class Runner:
    """Reads tokens into a cache with a decoder's program.

    Args:
        decoder: the exported `pt2mx.pt2e.language.decoder.CachedDecoder`.
        device: the device that it runs on.
        packages: "prompt" and "token" -> the package to call instead of the decoder; empty without packages.
    """

    def __init__(
        self, decoder: GraphModule, device: torch.device, packages: Mapping[str, Callable[..., Tensor]]
    ) -> None:
        self.decoder, self.device = decoder, device
        self.compiles = False
        self._pads = False  # prompts, whose lengths a CUDA graph fixes
        self._prompt = packages.get("prompt", decoder)
        package = packages.get("token")
        self._single = _step_programs(decoder, device) if package is None else Programs(package, package)
        #: the same without CUDA graphs of torch, to capture in a graph
        self._single_uncaptured = self._single

    def compile(self, **options: Any) -> None:
        """Compile the program at its first call, for prompts of any length and for single tokens.

        `options` of `torch.compile` apply to single tokens. On a GPU, where a mode may ask for CUDA graphs, they also
        apply to prompts."""
        self.compiles = True
        self._pads = self.device.type == "cuda"
        self._prompt = _compiled(self.decoder, {"dynamic": True, **(options if self._pads else {})})
        programs = _step_programs(self.decoder, self.device)
        overlaps = self._pads and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._single = self._single_uncaptured = _compiled_programs(programs, options, overlaps)
        plain = _without_graphs(options)
        if plain != options:
            self._single_uncaptured = _compiled_programs(programs, plain, overlaps)

    def step_of(self, batch: int) -> Callable[..., Tensor]:
        """Return the program for a single token of each sequence, without a CUDA graph of torch in it."""
        return self._single_uncaptured.of(batch)

    def read(self, inputs: Mapping[str, Any], mask: Tensor, kept: Tensor, cache: DecoderCache) -> Tensor:
        """Read tokens, write the cache, and return the logits of the columns `kept`, (T,) int64: (B, T, vocabulary).

        `inputs` are those of the program for the tokens; the mask is (B, slots) int64."""
        length = inputs["input_ids"].shape[1]
        size = _CHUNK.get(self.device.type, _CHUNK["cpu"])
        if length <= size:
            return self._read(inputs, mask, kept, cache)
        logits, chunk_of = [], torch.zeros_like(kept)
        first = 0
        for last in _ends_of_chunks(length, size, inputs.get("image_rows")):
            here = (kept >= first) & (kept < last)
            chunk = {name: value[..., first:last] if name in OF_TOKENS else value for name, value in inputs.items()}
            logits.append(self._read(chunk, mask, kept[here] - first, cache))
            chunk_of += kept >= last
            first = last
        by_chunk = chunk_of.argsort(stable=True)  # the order of the logits
        return torch.cat(logits, 1)[:, by_chunk.argsort()]

    def _read(self, inputs: Mapping[str, Any], mask: Tensor, kept: Tensor, cache: DecoderCache) -> Tensor:
        filled, length = cache.length, inputs["input_ids"].shape[1]
        if self._pads and length > 1 and all(layer.is_croppable for layer in cache.layers):
            padding = -length % _LENGTH_MULTIPLE
            if filled + length + padding <= mask.shape[1]:  # later tokens overwrite the slots of the padding
                of_tokens = {name: F.pad(inputs[name], (0, padding)) for name in OF_TOKENS if name in inputs}
                inputs = {**inputs, **of_tokens}
        if length > 1:
            program = self._prompt
        elif len(kept) == 1:
            program = self._single.of(len(mask))
        else:
            program = self.decoder
        start = torch.tensor([filled], device=self.device)
        logits = program(**inputs, attention_mask=mask, start=start, logits_to_keep=kept, **cache.inputs())
        cache.advance(length)
        return logits.clone() if self._pads else logits  # the next call of a CUDA graph overwrites them


def _step_programs(decoder: GraphModule, device: torch.device) -> Programs:
    """Return the programs for single tokens of a few and of many sequences; they share the tensors of the decoder."""
    single = with_single_steps(decoder)
    if fuse_decoding.applies_to(single):
        few = _with_passes(single, fuse_decoding, use_decoding_attention, fuse_rope)
        return Programs(few, _with_passes(single, use_decoding_attention, fuse_rope))
    if supports("attend in any step", torch.empty(0, device=device)):
        single = _with_passes(single, use_decoding_attention)
    return Programs(single, single)


def _with_passes(single: GraphModule, *passes: GraphPass) -> GraphModule:
    """Return a copy of the program for single tokens, changed by passes. It stores what depends on positions alone."""
    step = copy_sharing_tensors(single, delays_code=True)
    run_passes(step, passes)
    return generate_code(store_positions(step, _POSITIONS))


def _compiled(
    program: Callable[..., Tensor], options: Mapping[str, Any], overlaps: bool = False
) -> Callable[..., Tensor]:
    """Return a compiled program. overlaps: Inductor's kernels begin while the kernel before ends (programmatic
    dependent launch)."""
    compiled = torch.compile(program, **_unguarded(options))
    pdl = {"triton.enable_pdl": True} if overlaps else {}

    def call(**inputs: Any) -> Tensor:
        # Inductor reads the number of a token in a scan from a tensor
        with torch._dynamo.config.patch(capture_scalar_outputs=True), torch._inductor.config.patch(pdl):
            return compiled(**inputs)

    return call


def _unguarded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `torch.compile` for a program whose module never changes.

    Guards on hundreds of parameters take a tenth of a step on the CPU. Guards on the inputs stay, so the generated code
    need not check sizes again. torch takes a mode or options: the mode becomes options."""
    if options.get("backend", "inductor") != "inductor":
        return dict(options)
    given = dict(options)
    mode, of_user = given.pop("mode", None), given.pop("options", None)
    joined = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe, "size_asserts": False}
    if mode:
        joined |= torch._inductor.list_mode_options(mode)
    joined |= of_user or {}
    return {**given, "options": joined}


def _compiled_programs(programs: Programs, options: Mapping[str, Any], overlaps: bool) -> Programs:
    few, many = programs
    compiled = _compiled(many, options, overlaps)
    return Programs(compiled if few is many else _compiled(few, options, overlaps), compiled)


def _without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `torch.compile` without CUDA graphs."""
    modes = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
    plain = dict(options)
    if plain.get("mode") in modes:
        plain["mode"] = modes[plain["mode"]]
    if (plain.get("options") or {}).get("triton.cudagraphs"):
        plain["options"] = {**plain["options"], "triton.cudagraphs": False}
    return plain


def _ends_of_chunks(length: int, size: int, rows: Tensor | None) -> Iterator[int]:
    """Yield the ends of chunks of a prompt, none of which is within an image."""
    last = 0
    while last < length:
        last = min(last + size, length)
        while rows is not None and last < length and bool((rows[:, last - 1 : last + 1] > 0).all(1).any()):
            last += 1
        yield last


def write_packages(
    lowered: GraphModule, layers: Layers, images: ImageInputs | None, device: torch.device, folder: Path
) -> list[Path]:
    """Compile a lowered decoder for prompts of any length and for single tokens; return the packages.

    Where the machine code crashes it deletes all packages, and raises."""
    model, weights = without_weights(lowered)
    paths = _paths(model, device, folder)
    pass_batch_sizes(model)
    for name, path in paths.items():
        length = _TOKENS_OF_PACKAGE[name]
        tokens = None if length is None else torch.zeros(2, length, dtype=torch.long)
        example = {**decoder.inputs(layers, device, tokens, slots=5, images=images), "weights": weights}
        with without_torch_warnings():
            program = decoder.export(model if length is None else with_single_steps(model), example, length)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        try:
            check_loads(str(path), device)
        except MXError:
            for written in paths.values():
                written.unlink(missing_ok=True)
            raise
    return list(paths.values())


def load_packages(lowered: GraphModule, device: torch.device, folder: Path) -> dict[str, Callable[..., Tensor]]:
    """Load the packages for prompts and for single tokens; empty where the folder has none for the device."""
    if not any(folder.glob("*.aoti.pt2")):  # a digest takes time
        return {}
    model, weights = without_weights(lowered)
    paths = _paths(model, device, folder)
    if not all(path.is_file() for path in paths.values()):
        return {}
    packages: dict[str, Callable[..., Tensor]] = {}
    for name, path in paths.items():
        try:
            # on a GPU a CUDA graph holds calls of the package for single tokens, which excludes events between threads
            alone = device.type == "cuda" and _TOKENS_OF_PACKAGE[name] == 1
            code = torch._inductor.aoti_load_package(str(path), run_single_threaded=alone)
            packages[name] = _with_weights(code, weights)
        except Exception as error:
            raise MXError(
                f"cannot load {str(path)!r}: {error}; remove it, or compile the folder again on this machine"
            ) from None
    return packages


def _paths(model: GraphModule, device: torch.device, folder: Path) -> dict[str, Path]:
    """Return the paths of the packages for a device; their names hold a digest of the program."""
    digest = hashlib.sha256(model.code.encode()).hexdigest()[:8]
    return {name: folder / f"{name}.{device.type}.{digest}.aoti.pt2" for name in _TOKENS_OF_PACKAGE}


def _with_weights(code: Callable[..., Any], weights: list[Tensor]) -> Callable[..., Tensor]:
    def call(**inputs: Any) -> Tensor:
        stored = {name: inputs.pop(name) for name in (*KINDS, FEATURES) if name in inputs}
        # machine code checks nothing: it reads its inputs as the contiguous int64 that it was compiled for
        converted = {name: value.to(torch.int64).contiguous() for name, value in inputs.items()}
        if not all(tensor.is_contiguous() for tensor in pytree.tree_leaves(stored)):
            raise MXError("the cache is not contiguous: give what new_cache or a call gave")
        return code(**converted, **stored, weights=weights)

    return call


def without_weights(lowered: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """Turn the parameters and buffers of a decoder into a further input `weights`; return the decoder and them."""
    model = copy_sharing_tensors(lowered)
    graph, named, weights = model.graph, {**free_inputs(model), "weights": []}, []
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(attribute_of(model, node), GraphModule):
            continue  # the step of a scan
        weights.append(tensor_of(model, node))
        with graph.inserting_after(last):
            last = graph.placeholder(f"weight_{len(weights)}")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        named["weights"].append(last)
    set_inputs(model, named)
    delete_unused_tensors(model)
    return model, weights
