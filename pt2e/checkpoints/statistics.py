"""Collect statistics of the inputs of linear layers, with which GPTQ rounds the weights of a checkpoint."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.algorithms import gptq
from pt2mx.algorithms.options import GPTQ
from pt2mx.errors import MXError, check_integer
from pt2mx.pt2e.checkpoints.select_weights import is_linear
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.models.safetensors_shards import Entry, ShardReader, ShardWriter, read_header
from pt2mx.spec import MXSpec

#: key of a file's metadata: parameter -> rows
_ROWS = "rows"


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs x of a layer, (rows, K).

    Args:
        hessian: (K, K) float32, the sum of `x.T @ x`.
        rows: the number of rows.
    """

    hessian: Tensor
    rows: int

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1)

    def round(self, weight: Tensor, spec: MXSpec, options: GPTQ) -> Tensor:
        """Round a weight, (N, K) float, with GPTQ; return its values in the format, (N, K) float32."""
        damping = options.damping + options.damping_of_few * weight.shape[1] / self.rows
        return gptq(weight, self.hessian, spec, damping=damping, act_order=options.act_order)


@torch.no_grad()
def collect_statistics(model: nn.Module, batches: Iterable[Any]) -> dict[str, InputStatistics]:
    """Run a float model, and collect statistics of the inputs of its linear layers.

    Args:
        model: the model, in evaluation mode, on any device.
        batches: inputs, each a tensor, a tuple of arguments, or a mapping of keyword arguments.

    Returns:
        Name of a weight -> the statistics of its inputs, on the CPU; weights that no batch reached have none.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.checkpoints.statistics import collect_statistics
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4))
        >>> statistics = collect_statistics(model, [torch.eye(2), torch.ones(1, 2)])
        >>> statistics["0.weight"].rows, statistics["0.weight"].hessian
        (3, tensor([[2., 1.],
                [1., 2.]]))
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def add(name: str, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        inputs = args[0] if args else kwargs["input"]
        x = inputs.detach().reshape(-1, inputs.shape[-1]).float()  # (rows, K)
        sums[name] = torch.addmm(sums[name], x.T, x) if name in sums else x.T @ x
        rows[name] = rows.get(name, 0) + len(x)

    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    hooks = [
        module.register_forward_pre_hook(functools.partial(add, name), with_kwargs=True)
        for name, module in linears.items()
    ]
    try:
        for batch in batches:
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for hook in hooks:
            hook.remove()
    return {f"{name}.weight": InputStatistics(total.cpu(), rows[name]) for name, total in sums.items() if rows[name]}


def save_statistics(statistics: Mapping[str, InputStatistics], path: str | os.PathLike[str]) -> None:
    """Write statistics to a safetensors file.

    Args:
        statistics: the result of `collect_statistics`.
        path: the file to write.

    Raises:
        MXError: where no file can be written there.

    Example:
        >>> import tempfile, torch
        >>> from pt2mx.pt2e.checkpoints.statistics import StatisticsFile, collect_statistics, save_statistics
        >>> statistics = collect_statistics(torch.nn.Sequential(torch.nn.Linear(2, 4)), [torch.ones(3, 2)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_statistics(statistics, f"{folder}/inputs.safetensors")
        ...     StatisticsFile(f"{folder}/inputs.safetensors")["0.weight"].rows
        3
    """
    entries = {name: Entry(torch.float32, tuple(one.hessian.shape)) for name, one in statistics.items()}
    with whole_file(path) as file:
        writer = ShardWriter(file, entries, {_ROWS: json.dumps({name: one.rows for name, one in statistics.items()})})
        for name, one in statistics.items():
            writer.write(name, 0, one.hessian.float())


class StatisticsFile(Mapping[str, InputStatistics]):
    """The statistics in a file; each lookup reads one.

    Args:
        path: a file that `save_statistics` wrote.

    Raises:
        MXError: for another file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        header = read_header(self._path)
        try:
            self._rows: dict[str, int] = json.loads(header.metadata[_ROWS])
            wrong = self._rows.keys() != header.entries.keys()
        except (KeyError, ValueError, AttributeError, RecursionError):
            wrong = True
        if wrong:
            raise MXError(f"{str(path)!r} holds no statistics: give what save_statistics wrote")

    def __getitem__(self, name: str) -> InputStatistics:
        with ShardReader(self._path) as reader:
            return InputStatistics(reader.tensor(name), self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
