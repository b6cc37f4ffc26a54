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
from pt2mx.pt2e.checkpoints.conversion_plan import ConversionPlan
from pt2mx.pt2e.checkpoints.recode_plan import RecodingPlan
from pt2mx.pt2e.checkpoints.safetensors_shards import ShardReader, ShardWriter
from pt2mx.pt2e.checkpoints.statistics import InputStatistics
from pt2mx.pt2e.checkpoints.weight_formats import format_of
from pt2mx.pt2e.output import whole_file
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

    def convert(
        self, shards: Collection[str], source: Path, output: Path, jobs: int, finished: Callable[[str], None]
    ) -> None:
        """Convert shards, `jobs` at a time, each on its share of the threads."""
        stopped, threads = threading.Event(), torch.get_num_threads()
        pool = ThreadPoolExecutor(jobs, initializer=lambda: torch.set_num_threads(max(1, threads // jobs)))
        try:
            running = {pool.submit(self._convert, source / shard, output / shard, stopped): shard for shard in shards}
            for future in as_completed(running):
                future.result()
                finished(running[future])
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # new threads inherit it

    def _convert(self, source: Path, target: Path, stopped: threading.Event) -> None:
        entries = {
            written: entry
            for name, read in self.plan.entries[source.name].items()
            for written, entry in self.plan.outputs(name, read).items()
        }
        with ShardReader(source) as reader, whole_file(target) as file:
            writer = ShardWriter(file, entries, {**reader.metadata, "format": "pt"})
            recodings = self.plan.recodings if isinstance(self.plan, RecodingPlan) else set()
            for name in reader.entries:
                if isinstance(self.plan, RecodingPlan) and name in recodings:
                    for written, values in self.plan.recoded(name).items():
                        writer.write(written, 0, values)
                    continue
                for first, rows in self._slices(reader, name):
                    if stopped.is_set():
                        raise MXError("another shard failed")
                    for written, values in self._converted(name, rows, source.parent).items():
                        count = entries[written].rows  # of a scale fewer, or one
                        writer.write(written, first * count // max(1, reader.entries[name].rows), values)

    def _slices(self, reader: ShardReader, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the slices of a tensor; a weight that GPTQ rounds is one slice, already rounded."""
        statistics = self.statistics.get(self.plan.parameters.get(name, ""))
        if statistics is None:
            spec = self.plan.chosen.get(name)
            yield from reader.slices(name, 1 if spec is None else spec.block_rows)
        else:
            yield 0, statistics.round(reader.tensor(name), self.plan.chosen[name], self.gptq)

    def _converted(self, name: str, rows: Tensor, folder: Path) -> dict[str, Tensor]:
        """Return the rows to write for some rows of a tensor, (n, ...), by tensor of the output."""
        spec = self.plan.chosen.get(name)
        if spec is None:
            return {name: cast(name, rows, self.plan.dtype_of(rows.dtype))}
        tensor_scale = self._tensor_scale(name, spec, folder) if spec.scale_format.tensor else None
        scale, data = quantize_mx(rows.mT if name in self.plan.transposed else rows, spec, tensor_scale=tensor_scale)
        return self.plan.layout.to_tensors(name, format_of(spec), data, scale, tensor_scale)

    def _tensor_scale(self, name: str, spec: MXSpec, folder: Path) -> Tensor:
        """Return the tensor scale of a weight, from all weights that libraries fuse with it."""
        if name not in self._tensor_scales:
            largest = [torch.zeros(())]
            fused = fused_with(name, self.plan.chosen)
            for shard, entries in self.plan.entries.items():
                with ShardReader(folder / shard) as reader:
                    for one in fused & entries.keys():
                        for _, rows in reader.slices(one):
                            magnitude = rows.float().abs()
                            largest.append(torch.where(magnitude < torch.inf, magnitude, 0).amax())
            scale = tensor_scale_mx(torch.stack(largest), spec)
            self._tensor_scales.update(dict.fromkeys(fused, scale))  # another thread would compute the same
        return self._tensor_scales[name]


#: layers of one module that vLLM and others multiply at once, and so with one tensor scale
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def fused_with(name: str, weights: Collection[str]) -> set[str]:
    """Return the weights that libraries fuse with a weight, itself included.

    Example:
        >>> from pt2mx.pt2e.checkpoints.convert_shards import fused_with
        >>> sorted(fused_with("mlp.up_proj.weight", ["mlp.up_proj.weight", "mlp.gate_proj.weight"]))
        ['mlp.gate_proj.weight', 'mlp.up_proj.weight']
    """
    module, _, attribute = name.rpartition(".")
    parent, _, layer = module.rpartition(".")
    group = next((layers for layers in _FUSED if layer in layers), (layer,))
    return {other for one in group if (other := f"{parent}.{one}.{attribute}".removeprefix(".")) in weights} | {name}


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the values of a tensor to another dtype.

    Raises:
        MXError: where a finite value becomes Inf.
    """
    if dtype == values.dtype:
        return values
    converted = values.to(dtype)
    lost = converted.isinf() & values.isfinite()
    if bool(lost.any()):
        wide = "give dtype='bfloat16' (--dtype bfloat16), which has the range of float32"
        advice = wide if dtype == torch.float16 else "leave dtype (--dtype) out, which keeps the checkpoint's own"
        raise MXError(f"{name} holds {float(values[lost].abs().max()):.6g}, which is Inf in {dtype}: {advice}")
    return converted
