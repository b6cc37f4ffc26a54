"""Quantize the shards of a checkpoint, some rows at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pt2mx.algorithms.options import GPTQ
from pt2mx.errors import MXError
from pt2mx.functional import quantize_mx, tensor_scale_mx
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan, cast
from pt2mx.pt2e.checkpoints.recoding import RecodingPlan
from pt2mx.pt2e.checkpoints.sources import Reader
from pt2mx.pt2e.checkpoints.statistics import InputStatistics
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.models.checkpoint_names import fused_with
from pt2mx.pt2e.models.safetensors_shards import ShardWriter
from pt2mx.pt2e.models.weight_formats import format_of
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class ShardConverter:
    """Writes the shards of a plan.

    Args:
        plan: what happens to each tensor.
        statistics: parameter of the model -> the statistics of its inputs; others are rounded to nearest.
        gptq: the options of GPTQ, which rounds weights that have statistics.
    """

    plan: ConversionPlan
    statistics: Mapping[str, InputStatistics]
    gptq: GPTQ
    _tensor_scales: dict[str, Tensor] = field(default_factory=dict)

    def convert(self, shards: Collection[str], output: Path, jobs: int, finished: Callable[[str], None]) -> None:
        """Convert shards, `jobs` at a time, each on its share of the threads."""
        stopped, threads = threading.Event(), torch.get_num_threads()
        pool = ThreadPoolExecutor(jobs, initializer=lambda: torch.set_num_threads(max(1, threads // jobs)))
        try:
            running = {pool.submit(self._convert, shard, output / shard, stopped): shard for shard in shards}
            for future in as_completed(running):
                future.result()
                finished(running[future])
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # new threads inherit it

    def _convert(self, shard: str, target: Path, stopped: threading.Event) -> None:
        entries = {
            written: entry
            for name, read in self.plan.entries[shard].items()
            for written, entry in self.plan.outputs(name, read).items()
        }
        with self.plan.shards.open(shard) as reader, whole_file(target) as file:
            writer = ShardWriter(file, entries, {**reader.metadata, "format": "pt"})
            for name in reader.entries:
                for written, first, rows in self.written(reader, name):
                    if stopped.is_set():
                        raise MXError("another shard failed")
                    writer.write(written, first, rows)

    def written(self, reader: Reader, name: str) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what to write for a tensor of a shard.

        Yields:
            The name of a tensor, the index of its first row to write, and the rows.
        """
        if isinstance(self.plan, RecodingPlan) and self.plan.is_recoded(name):
            yield from self.plan.recoded(name)
            return
        entry = reader.entries[name]
        outputs = self.plan.outputs(name, entry)
        for first, rows in self._slices(reader, name):
            for written, values in self._converted(name, rows, entry.shape).items():
                count = outputs[written].rows  # of a scale fewer, or one
                yield written, first * count // max(1, entry.rows), values

    def _slices(self, reader: Reader, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the slices of a tensor; a weight that GPTQ rounds is one slice, already rounded."""
        statistics = self.statistics.get(self.plan.parameters.get(name, ""))
        if statistics is None:
            spec = self.plan.chosen.get(name)
            yield from reader.slices(name, 1 if spec is None else spec.block_rows)
        else:
            yield 0, statistics.round(reader.tensor(name), self.plan.chosen[name], self.gptq)

    def _converted(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the rows to write for some rows of a tensor, (n, ...), by tensor of the output. `shape`: of all its
        rows."""
        spec = self.plan.chosen.get(name)
        if spec is None:
            return {name: cast(name, rows, self.plan.dtype_of(rows.dtype))}
        tensor_scale = self._tensor_scale(name, spec) if spec.has_tensor_scale else None
        is_transposed = name in self.plan.transposed
        scale, data = quantize_mx(rows.mT if is_transposed else rows, spec, tensor_scale=tensor_scale)
        of_all = shape[-1 if is_transposed else -2]
        return self.plan.layout.to_tensors(name, format_of(spec), data, scale, tensor_scale, rows=of_all)

    def _tensor_scale(self, name: str, spec: MXSpec) -> Tensor:
        """Return the tensor scale of a weight, from all weights that libraries fuse with it."""
        if name not in self._tensor_scales:
            largest = [torch.zeros(())]
            fused = fused_with(name, self.plan.chosen)
            for shard, entries in self.plan.entries.items():
                with self.plan.shards.open(shard) as reader:
                    for one in fused & entries.keys():
                        for _, rows in reader.slices(one):
                            magnitude = rows.float().abs()
                            largest.append(torch.where(magnitude < torch.inf, magnitude, 0).amax())
            scale = tensor_scale_mx(torch.stack(largest), spec)
            self._tensor_scales.update(dict.fromkeys(fused, scale))  # another thread would compute the same
        return self._tensor_scales[name]
