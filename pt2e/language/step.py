"""Generate tokens by steps in tensors of fixed shapes: decode a token, choose the next one, make it the next input.

No value of a `Step` goes through Python. A GPU replays the step as one CUDA graph; `choose_tokens` reads the tokens on
the host one step behind, so that the GPU never waits. A step knows the length and the ends of texts; the host evaluates
transformers' other stopping criteria.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.cache import CACHE, DecoderCache
from pt2mx.pt2e.language.sampling import Choice

if TYPE_CHECKING:
    from pt2mx.kernels.inductor.record import RecordedProgram
    from pt2mx.pt2e.language.runtime import Runner

_criteria = import_extra("transformers.generation.stopping_criteria", "hf")
_generation = import_extra("transformers.generation.utils", "hf")

#: inputs of the program that grow by one with each token
_COUNTED = ("position_ids", "image_positions")
#: parts of a row of logits that programs reduce at the same time: Inductor's argmax has one program a row
_PARTS = 128
#: steps that the host may be behind
_MOST_BEHIND = 1
#: type of device -> the steps that the host is behind
BEHIND = {"cuda": _MOST_BEHIND}
#: stopping criteria that stop all sequences at once
_OF_ALL = (_criteria.MaxLengthCriteria, _criteria.MaxTimeCriteria)
#: stopping criteria that take tokens on any device
_ON_ANY_DEVICE = (*_OF_ALL, _criteria.StopStringCriteria)


class Step:
    """The state of a step, and the step.

    `inputs` are those of the first step, tokens, positions and images, with a mask of (B, slots) int64."""

    def __init__(
        self,
        runner: Runner,
        inputs: Mapping[str, Any],
        mask: Tensor,
        cache: DecoderCache,
        choice: Choice,
        vocabulary: int,
    ) -> None:
        batch, device = len(mask), mask.device
        on_gpu = device.type == "cuda"
        self.program, self.cache, self.choice = runner.step_of(batch), cache, choice
        #: True where the next call of `generate` may take the cache
        self.cache_is_free = False
        self._key = self._key_of(runner, inputs, cache, choice)
        #: draws the tokens
        self.generator = torch.cuda.default_generators[mask.get_device()] if on_gpu else torch.default_generator
        self._inputs = pytree.tree_map(torch.clone, dict(inputs))
        self._mask = mask.clone()
        self._ends = torch.tensor(choice.ends, dtype=torch.long, device=device)
        self._pad = None if choice.pad is None else torch.tensor(choice.pad, device=device)
        self.start = torch.zeros(1, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.seen: Tensor | None = None
        if any(processor.reads_seen for processor in choice.processors):
            self.seen = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        #: (2, B) int64: the tokens of the last step, and which sequences have not ended
        self._result = torch.zeros(2, batch, dtype=torch.long, device=device)
        #: copies of results on the host, each with the event of its copy
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(_MOST_BEHIND + 1):
            host = torch.zeros_like(self._result, device="cpu", pin_memory=on_gpu)
            self._free.append((host, torch.cuda.Event() if on_gpu else None))
        self._captures = on_gpu
        #: the CUDA graph, and what it returns
        self._captured: tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]] | None = None
        kept = torch.zeros(1, dtype=torch.long, device=device)
        state = {"attention_mask": self._mask, "start": self.start, "logits_to_keep": kept}
        #: returns the logits; it does not refer to the step, which would then be freed late
        self._decode = partial(self.program, **self._inputs, **state, **cache.inputs())
        #: on a CPU, the compiled program
        self._recorded: RecordedProgram | None = None
        self._advance, self._parts = _advance, 1
        if runner.compiles and on_gpu:
            self._advance, self._parts = torch.compile(_advance), _PARTS
        elif runner.compiles:
            from pt2mx.kernels.inductor import record  # it imports Inductor, which takes seconds

            self._recorded = record.RecordedProgram(self._decode)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Give copies and pickles of a model None in place of its step: nothing copies a CUDA graph."""
        return type(None), ()

    @staticmethod
    def _key_of(runner: Runner, inputs: Mapping[str, Any], cache: DecoderCache, choice: Choice) -> tuple[Any, ...]:
        shapes = [tuple(one.shape) for one in pytree.tree_leaves(dict(inputs))]
        addresses = [one.data_ptr() for layer in cache.layers for one in layer.tensors]
        return runner.step_of(cache.batch_size), list(inputs), shapes, cache.batch_size, cache.slots, addresses, choice

    def fits(self, runner: Runner, inputs: Mapping[str, Any], cache: DecoderCache, choice: Choice) -> bool:
        """Return True where the step and its CUDA graph can run with these arguments."""
        return self._may_write and self._key == self._key_of(runner, inputs, cache, choice)

    @property
    def _may_write(self) -> bool:
        """True where the step's tensors may change: those of `torch.inference_mode` only inside of it."""
        return torch.is_inference_mode_enabled() or not self._mask.is_inference()

    @property
    def is_captured(self) -> bool:
        """True where the step is a CUDA graph, or its kernels on a CPU are recorded."""
        return self._captured is not None or (self._recorded is not None and self._recorded.is_recorded)

    def frees_cache_for(self, batch: int, slots: int) -> bool:
        """Return True where a new call of `generate` may take the cache for these sizes."""
        is_free = self.cache_is_free and self._may_write
        return is_free and (batch, slots) == (self.cache.batch_size, self.cache.slots)

    def take_cache(self) -> DecoderCache:
        """Return the cache, empty."""
        self.cache_is_free = False
        self.cache.reset()
        for layer in self.cache.layers:
            for tensor in layer.tensors:
                tensor.zero_()
        return self.cache

    def begin(self, inputs: Mapping[str, Any], mask: Tensor, tokens: Tensor, ignored: Tensor | None = None) -> None:
        """Set the state after the prompts, (B, S) int64, before their first token is chosen.

        `inputs` and `mask` are as for the first step, the tokens in them have no effect; `ignored` is the number of
        first tokens of each prompt that are not seen, (B,) int64, or None."""
        pytree.tree_map(lambda own, new: own.copy_(new), self._inputs, dict(inputs))
        for name in _COUNTED:
            if name in self._inputs:
                self._inputs[name] -= 1
        self._mask.copy_(mask)
        self.start.fill_(self.cache.length - 1)
        self.length.fill_(tokens.shape[1])
        self.unfinished.fill_(True)
        if self.seen is not None:
            tokens, vocabulary = tokens.to(self.seen.device, torch.long), self.seen.shape[1]
            if ignored is not None:
                columns = torch.arange(tokens.shape[1], device=tokens.device)
                tokens = tokens.masked_fill(columns < ignored.to(tokens.device)[:, None], vocabulary)
            self.seen.copy_(nn.functional.pad(self.seen, (0, 1)).zero_().scatter_(1, tokens, True)[:, :vocabulary])
        self._free.extend(self._sent)
        self._sent.clear()

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token of each sequence by logits, (B, 1, vocabulary), and make it the next input.

        Return the logits and the processed scores, (B, vocabulary) each; float32 where they are more than an order."""
        logits = logits[:, -1] if self.choice.is_plain else logits[:, -1].float()
        scores = self.choice.scores(logits, self)
        counted = [self._inputs[name] for name in _COUNTED if name in self._inputs]
        self._advance(
            self.choice.weights(scores),
            self._parts,
            self.unfinished,
            self._ends,
            self._pad,
            self.seen,
            self._inputs["input_ids"],
            [self.start, self.length, *counted],
            self._result,
        )
        return logits, scores

    def run(self) -> tuple[Tensor, Tensor]:
        """Read the chosen tokens and choose the next ones; return as `choose`, until the next call. On a GPU the
        first call captures the step."""
        if self._captures:
            self._captured, self._captures = self._capture(), False
        if self._captured is None:
            results = self._run()
        else:
            graph, results = self._captured
            graph.replay()
        self.cache.advance(1)
        return results

    def _run(self) -> tuple[Tensor, Tensor]:
        return self.choose(self._decode() if self._recorded is None else self._recorded())

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]] | None:
        """Record the step as a CUDA graph; return None for a step in which the host waits for the GPU.

        Calls before compile and tune the step, and leave the state as it was."""
        stream, mode = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self._try()
                with warnings.catch_warnings():  # of torch, at the first use: the mode is a prototype
                    warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
                    torch.cuda.set_sync_debug_mode("error")
                self._try()
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return None
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self._run()
        return graph, results

    def _try(self) -> None:
        """Run the step, and take it back: its slot of the cache is written again."""
        changed = [self.start, self.length, self.unfinished, self._result, self.seen, self._inputs]
        state = pytree.tree_map(lambda one: None if one is None else one.clone(), changed)
        random = self.generator.get_state()
        try:
            self._run()
        finally:
            pytree.tree_map(lambda one, old: None if one is None else one.copy_(old), changed, state)
            self.generator.set_state(random)

    def send(self) -> None:
        """Queue a copy of the chosen tokens to the host."""
        host, event = self._free.popleft()
        host.copy_(self._result, non_blocking=True)
        if event is not None:
            event.record()
        self._sent.append((host, event))

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait for the earliest tokens that were sent; return them, (B,) int64, and which sequences no token has ended,
        (B,) bool, on the host."""
        host, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        tokens, unfinished = host.clone()
        self._free.append((host, event))
        return tokens, unfinished.bool()


def _argmax(weights: Tensor, parts: int) -> Tensor:
    """Return the index of the largest value of each row, (B,), the first one of equals."""
    if parts == 1:
        # on a CPU by NumPy, which finds the first NaN as well
        return torch.from_numpy(weights.float().numpy().argmax(-1)) if weights.is_cpu else weights.argmax(-1)
    padding = -weights.shape[-1] % parts
    values = nn.functional.pad(weights, (0, padding), value=-math.inf).unflatten(-1, (parts, -1))
    part = values.amax(-1).argmax(-1, keepdim=True)
    return (part * values.shape[-1] + values.argmax(-1).gather(-1, part))[:, 0]


def _advance(
    weights: Tensor,
    parts: int,
    unfinished: Tensor,
    ends: Tensor,
    pad: Tensor | None,
    seen: Tensor | None,
    token: Tensor,
    counters: list[Tensor],
    result: Tensor,
) -> None:
    """Choose the tokens of the largest weights, and write all that follows from them."""
    tokens = _argmax(weights, parts)
    if pad is not None:
        tokens = torch.where(unfinished, tokens, pad)
    if len(ends):
        unfinished &= (tokens[:, None] != ends).all(1)
    if seen is not None:
        seen.scatter_(1, tokens[:, None], True)
    token.copy_(tokens[:, None])
    for counter in counters:
        counter += 1
    result[0], result[1] = tokens, unfinished


class Stopping:
    """The stopping criteria of one call with prompts, (B, S) int64."""

    def __init__(self, criteria: Iterable[Any], ids: Tensor) -> None:
        #: the length of the longest text; None: no limit
        self.longest: int | None = None
        #: the tokens that end a sequence
        self.ends: tuple[int, ...] = ()
        #: True where sequences that have ended go on with padding
        self.pads = False
        #: True where the host ends single sequences
        self.ends_rows = False
        warns, others, moves = [], [], True
        for criterion in criteria:
            kind = type(criterion)
            self.pads |= hasattr(criterion, "eos_token_id")
            if kind is _criteria.MaxLengthCriteria:
                length, known = criterion.max_length, criterion.max_position_embeddings
                self.longest = length if self.longest is None else min(self.longest, length)
                if known and length > known:
                    warns.append(criterion)  # it warns of texts longer than the model was made for
            elif kind is _criteria.EosTokenCriteria:
                self.ends += tuple(criterion.eos_token_id.tolist())
            else:
                others.append(criterion)
                self.ends_rows |= kind not in _OF_ALL
                moves &= kind in _ON_ANY_DEVICE
        self._on_host = _criteria.StoppingCriteriaList([*warns, *others])
        self._ids = ids.cpu() if moves and self._on_host else ids

    def stops(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor | None:
        """Return which sequences the host ends after a token of each, (B,) bool on the host; None without criteria.

        Args:
            tokens: (B,) int64, on the host.
            scores: the scores of each token so far, or None.
        """
        if not self._on_host:
            return None
        self._ids = torch.cat([self._ids, tokens[:, None].to(self._ids.device)], 1)
        return self._on_host(self._ids, scores).cpu()


def choose_tokens(
    step: Step, logits: Tensor, ids: Tensor, longest: int, stopping: Stopping, config: Any, streamer: Any
) -> Any:
    """Generate tokens after prompts, (B, S) int64, up to a length; return the result of transformers' `_sample`.

    The host sees the end of the last sequence after it has queued another step, which it takes back: its token, its
    scores, its slot in the cache and its random numbers. It does the same when a criterion or the streamer raises.

    The step has begun; `logits` are of the last token of each prompt, (B, 1, vocabulary)."""
    total, cache = longest - ids.shape[1], step.cache
    waits = stopping.ends_rows and len(ids) > 1  # the padding after an end is an input of the next step
    behind = 0 if waits else BEHIND.get(cache.layers[0].tensors[0].device.type, 0)
    alive = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    tokens: list[Tensor] = []
    raw_scores: list[Tensor] = []
    scores: list[Tensor] = []
    random: deque[Tensor] = deque(maxlen=_MOST_BEHIND + 1)
    queued = 0
    try:
        while len(tokens) < total and bool(alive.any()):
            while queued < total and queued - len(tokens) <= behind:
                if behind and step.choice.samples:
                    random.append(step.generator.get_state())
                raw, processed = step.run() if queued else step.choose(logits)
                step.send()
                queued += 1
                if step.choice.records:
                    raw_scores.append(raw.clone())
                    scores.append(processed.clone())
            new, unfinished = step.receive()
            tokens.append(new)
            of_tokens = tuple(scores[: len(tokens)]) if step.choice.records and config.output_scores else None
            stopped = stopping.stops(new, of_tokens)
            alive &= unfinished if stopped is None else unfinished & ~stopped
            if waits and stopped is not None:
                step.unfinished.copy_(alive)
            if streamer is not None:
                streamer.put(new)
    finally:
        extra = queued - max(len(tokens), 1)
        if extra > 0:
            cache.advance(-extra)
            if random:
                step.generator.set_state(random[-extra])
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([ids, torch.stack(tokens, 1).to(ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    count = len(tokens)
    return _generation.GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores[:count]) if config.output_scores else None,
        logits=tuple(raw_scores[:count]) if config.output_logits else None,
        **{CACHE: cache},
    )
