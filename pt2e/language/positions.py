"""Find how many positions the tables of a program have: learned ones, or computed ones of a fixed number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node, map_arg

from pt2mx.errors import MXError
from pt2mx.pt2e.language.arguments import LONGEST_TEXT

aten = torch.ops.aten

#: operator -> the position of the table, of its dimension (None: the first one), and of the indices in its arguments
_LOOKUPS: dict[Any, tuple[int, int | None, int]] = {
    aten.embedding.default: (0, None, 1),
    aten.index_select.default: (0, 1, 2),
    aten.gather.default: (0, 1, 2),
    aten.index.Tensor: (0, None, 1),
}
#: the example text: its length, beyond which indices of distances stay the same, its first slot and its first position
_LENGTH, _SLOT, _POSITION = 300, 1000, 2000
#: tables may have rows before that of position 0, but not as many
_MOST_OFFSET = 100
#: what counts the tokens: the slots of the cache, padding included, or the input `position_ids`
SLOTS, POSITION_IDS = "slots", "position_ids"
#: limit -> what else gives a text room
_REMEDIES = {LONGEST_TEXT: "; or quantize the model with length={0}, or --text-length {0}"}


def positions_of(program: ExportedProgram) -> dict[str, int]:
    """Return the number of positions in the tables of a decoder's or an encoder's program, by what counts the tokens.

    It is empty for a program without such tables, as with RoPE. The indices are computed for an example."""
    with torch.device("cpu"):  # whatever device the caller made the default
        columns = torch.arange(_LENGTH)[None]
        inputs = {
            "input_ids": torch.zeros_like(columns),
            "position_ids": columns + _POSITION,
            "start": torch.tensor([_SLOT]),
            "attention_mask": torch.ones(1, _SLOT + _LENGTH, dtype=torch.long),
        }
        names = program.graph_signature.user_inputs
        firsts = {SLOTS: _SLOT, POSITION_IDS: _POSITION}
        if "start" not in names:  # an encoder
            inputs["attention_mask"], firsts = torch.ones_like(columns), {SLOTS: 0}
        found: dict[str, int] = {}
        for rows, indices in _lookups(program, {name: one for name, one in inputs.items() if name in names}):
            first = int(indices.flatten()[0])
            if indices.numel() == _LENGTH and torch.equal(indices.flatten() - first, columns[0]):
                for name, start in firsts.items():
                    if 0 <= first - start <= _MOST_OFFSET:
                        found[name] = min(found.get(name, rows), rows - (first - start))
        return found


def _lookups(program: ExportedProgram, inputs: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of each table of a fixed size, and the indices that inputs make for it: (tokens,) int64."""
    signature, known = program.graph_signature, dict[Node, Any]()
    buffers = {name: program.state_dict.get(key, program.constants.get(key)) for name, key in _buffers(signature)}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = inputs.get(node.name, buffers.get(node.name))
            if isinstance(value, Tensor) and not value.is_floating_point():
                known[node] = value.cpu()
        elif node.op == "call_function" and _is_integer(node) and all(one in known for one in node.all_input_nodes):
            with suppress(Exception):  # sizes that the example does not have: what follows from them is not known
                known[node] = _call(node, known)
        if node.target in _LOOKUPS and (lookup := _lookup(node, known)) is not None:
            yield lookup


def _buffers(signature: Any) -> list[tuple[str, str]]:
    return [*signature.inputs_to_buffers.items(), *signature.inputs_to_lifted_tensor_constants.items()]


def _is_integer(node: Node) -> bool:
    """Return whether a node computes an integer, a boolean, or a tensor of those."""
    value = node.meta.get("val")
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    is_tensor = isinstance(value, Tensor) and not value.is_floating_point()
    return is_tensor or isinstance(value, int | torch.SymInt | torch.SymBool)


def _call(node: Node, known: Any) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    on_cpu = {name: torch.device("cpu") if isinstance(one, torch.device) else one for name, one in kwargs.items()}
    return node.target(*args, **on_cpu)  # type: ignore[operator]


def _lookup(node: Node, known: Mapping[Node, Any]) -> tuple[int, Tensor] | None:
    """Return the rows of the table that a node reads, and its indices; None where either is not known."""
    arguments: list[Any] = [None if at is None else node.args[at] for at in _LOOKUPS[node.target]]
    table, dim, indices = arguments
    if isinstance(indices, list | tuple):  # one for each dimension
        dim, indices = len(indices) - 1, indices[-1] if not any(indices[:-1]) else None
    rows = table.meta["val"].shape[dim or 0]
    if not isinstance(rows, int) or indices not in known:
        return None
    values = known[indices]
    if node.target is aten.gather.default:  # equal indices for all columns of a row
        values = values.movedim(dim, -1).reshape(-1, values.shape[dim])[0]
    return rows, values


class Room(NamedTuple):
    """The tokens of the longest prompt, the positions of the model that reads it, what counts them, and its row."""

    prompt: int
    positions: int
    name: str = POSITION_IDS
    row: int = 0

    @property
    def new_tokens(self) -> int:
        """The most tokens that can be generated; the model does not read the last one."""
        return self.positions + 1 - self.prompt

    def check(self, asked: int, option: str) -> None:
        """Raise an `MXError` where a prompt and the new tokens that an option asks for have no room."""
        other = _REMEDIES.get(self.name, "").format(self.prompt + max(asked, 1) - 1)  # the last token is not read
        if self.new_tokens < 1:
            raise MXError(
                f"the prompt has {self.prompt} tokens, but the model has {self.positions} positions: give a shorter one"
                f"{other}"
            )
        if asked > self.new_tokens:
            raise MXError(
                f"the prompt has {self.prompt} tokens, and {asked} new ones are asked for, but the model has "
                f"{self.positions} positions: give {option}{self.new_tokens} or less, or a shorter prompt{other}"
            )


def room_of(limits: Mapping[str, int], tokens: Tensor, mask: Tensor | None) -> Room | None:
    """Return the room that the positions of a model leave for prompts, (B, S); None: there is no limit."""
    lengths = [tokens.shape[1]] if mask is None else mask.sum(-1).tolist()
    longest = max(lengths)
    rooms = [
        Room(longest if name == POSITION_IDS else tokens.shape[1], limit, name, lengths.index(longest))
        for name, limit in limits.items()
    ]
    return min(rooms, key=lambda room: room.new_tokens, default=None)


def check_positions(limits: Mapping[str, int], filled: int, positions: Tensor, given: bool = False) -> None:
    """Raise an `MXError` for a text that is longer than the positions of a program.

    A GPU waits for the check of a text that is longer with its padding, or whose positions are given.

    Args:
        limits: as `positions_of` returns them.
        filled: the number of tokens in the cache.
        positions: (B, S) int64, the positions of the next tokens.
        given: True where the caller has chosen the positions.
    """
    last = filled + positions.shape[1] - 1
    for name, limit in limits.items():
        if name == POSITION_IDS and (given or last >= limit):
            reached = [int(positions.min()), int(positions.max())]
        else:
            reached = [last]
        if wrong := [position for position in reached if not 0 <= position < limit]:
            raise MXError(
                f"the text has a token at position {wrong[-1]}, but the model knows the positions 0 to {limit - 1}: "
                f"give at most {limit} tokens in all, prompt and new ones"
            )
