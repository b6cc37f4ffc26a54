"""Checkpoints of a distillation, by torch.distributed.checkpoint: it goes on where it was stopped."""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.qspec import CONFIG_KEY

if TYPE_CHECKING:
    from pt2mx.pt2e.optimize.distill import Distillation

#: what Adam keeps of a parameter
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: values of each weight that tell a float program from another
_FEW = 256


def make_folder(folder: str | Path) -> None:
    """Make the folder of a checkpoint where it is missing, before a training that would end with an error."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MXError(f"checkpoint {str(folder)!r} cannot be a folder: {error.strerror}; name another one") from None


def identity(prepared: GraphModule, float_program: object, batches: Sequence[object]) -> dict[str, object]:
    """Return what tells a training from another with the same settings: its formats, and checksums of the configs of
    its operators, of the float weights and of the batches.

    Of a float input only the shape counts: each run may draw it anew.
    """
    formats = Counter(str(module.spec) for module in prepared.modules() if isinstance(module, MXFakeQuantize))
    nodes = [node for graph in graph_modules(prepared) for node in graph.graph.nodes]
    recipe = [f"{node.name} {node.meta[CONFIG_KEY]}" for node in nodes if CONFIG_KEY in node.meta]
    weights = float_program.parameters() if isinstance(float_program, nn.Module) else ()
    inputs = (leaf for batch in batches for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return {
        "formats": " + ".join(f"{count} {spec}" for spec, count in sorted(formats.items())),
        "recipe": zlib.crc32("\n".join(recipe).encode()),
        "float weights": _checksum(weight.detach().flatten()[:_FEW] for weight in weights),
        "batches": len(batches),
        "inputs": _checksum(x if not x.is_floating_point() else torch.tensor(x.shape) for x in inputs),
    }


def _checksum(tensors: Iterable[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


class Checkpoint:
    """The newest state of a training in a folder.

    With the same number of ranks, the steps after loading are those of a training that was not stopped, to the bit.

    Args:
        folder: it holds one folder, of torch.distributed.checkpoint, whose name is the number of batches seen.
        settings: a training with other settings is not continued.
        group: the ranks that train, each with its share of the parameters; None for one process.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
        make_folder(folder)
        self._folder = Path(folder)
        self._settings = "\n".join(f"{name}={value!r}" for name, value in settings.items())
        self._ranks: dict[str, Any] = {"process_group": group, "no_dist": group is None}

    def load(self, training: Distillation) -> int:
        """Load the newest state, if there is one; return the number of batches that it has seen."""
        newest = self._newest()
        if newest is None:
            return 0
        settings = {"settings": ""}
        self._read(settings, newest)
        saved, given = (text.splitlines() for text in (settings["settings"], self._settings))
        if saved != given:
            theirs, own = (", ".join(line for line in a if line not in b) for a, b in ((saved, given), (given, saved)))
            raise MXError(
                f"{str(self._folder)!r} holds a training with {theirs}, not {own}: give the same, or another folder"
            )
        kept = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
        if absent := [name for name in training.masters if f"master.{name}" not in kept]:
            raise MXError(f"{str(self._folder)!r} holds the training of another model: without {absent[0]!r}")
        # a graph of layers has no buffers that nothing reads; they, and random numbers of other ranks, stay as they are
        training.state = {name: tensor.detach().clone() for name, tensor in training.names.items()}
        state = {name: value for name, value in self._state(training).items() if name in kept}
        self._read(state, newest)
        for name, master in training.masters.items():
            training.trained[name].detach().copy_(master)
            training.optimizer.state[master] = {
                "step": state[f"step.{name}"],
                **{moment: state[f"{moment}.{name}"] for moment in _MOMENTS},
            }
        training.before, training.best = state["before"], state["best"]
        if f"random.{training.rank}" in state:
            _set_random_state(state[f"random.{training.rank}"])
        return int(newest.name)

    def save(self, training: Distillation, seen: int) -> None:
        """Write the state after `seen` batches, and remove the one before."""
        folder = self._folder / str(seen)
        with _quiet():
            dcp.save(self._state(training), checkpoint_id=folder, **self._ranks)
        if training.rank == 0:
            for other in self._folder.iterdir():
                if other != folder and other.name.isdigit():
                    shutil.rmtree(other)

    def _newest(self) -> Path | None:
        # the file of metadata is written last
        complete = [file.parent for file in self._folder.glob("*/.metadata") if file.parent.name.isdigit()]
        return max(complete, key=lambda folder: int(folder.name), default=None)

    def _read(self, state: dict[str, Any], folder: Path) -> None:
        with _quiet():
            dcp.load(state, checkpoint_id=folder, **self._ranks)

    def _state(self, training: Distillation) -> dict[str, Any]:
        state: dict[str, Any] = {"settings": self._settings, "before": training.before, "best": training.best}
        state[f"random.{training.rank}"] = _random_state()
        for name, master in training.masters.items():
            moments = training.optimizer.state.get(master, {})
            state[f"master.{name}"] = master
            state[f"step.{name}"] = moments.get("step", torch.zeros(()))
            for moment in _MOMENTS:
                state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(master))
        for name, tensor in training.names.items():
            state[f"best.{name}"] = training.state[name]
            if name not in training.masters:
                state[f"now.{name}"] = tensor
        return state


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _random_state() -> Tensor:
    """Return the states of the generators of the CPU and of the current GPU, uint8."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _set_random_state(state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size:
        torch.cuda.set_rng_state(state[size:])
