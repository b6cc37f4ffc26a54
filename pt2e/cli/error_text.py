"""Errors of other code (a model's, torch's) in one line for the user: type, message, and the place."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch.fx import GraphModule, Node

import pt2mx
from pt2mx.pt2e.torchao_pt2e import torchao

#: the ways for the model of a checkpoint that cannot be exported
WITHOUT_EXPORT = (
    "quantize it without an export, by `pt2mx convert-checkpoint`, or by PT2MXConfig while transformers loads it"
)
#: longest message in one line; the whole is in the traceback
_LONGEST = 300
#: where torch goes on to explain an error of an export, in many lines
_ESSAY = re.compile(
    r"\s*(\(unhinted: |\(Size-like symbols: |consider using data-dependent friendly|Caused by: |"
    r"For more information, run with TORCH_LOGS|The following call raised this error|"
    r"The error above occurred when calling|from user code:|"
    r"Set TORCHDYNAMO_VERBOSE|Hint: |Developer debug context: )"
)
#: what an interpreter of graphs adds to the message of an error
_AT_NODE = "\n\nWhile executing %"
#: a place in a node's `stack_trace`, innermost last
_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
#: folders that hold installed packages
_INSTALLED = {"site-packages", "dist-packages"}

Place = tuple[str, int, str]


def one_line(error: BaseException) -> str:
    """Return an error as `TypeError: can only add tensors (net.py:12 in forward)`.

    The lines of a message are joined; torch's explanations, and what is beyond 300 characters, are cut. The place is
    the innermost one in the user's code; where there is none, in that of installed packages, torch apart.
    """
    lines = [line.strip() for line in str(error).partition(_AT_NODE)[0].splitlines()]
    message = " ".join(line for line in lines if line)
    message = message[: found.start()] if (found := _ESSAY.search(message, 1)) else message
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST].rstrip()} ... (--traceback prints the whole)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = None if isinstance(error, SyntaxError) else _place(error)  # which names it itself
    if place is None:
        return text
    file, line, function = place
    return f"{text} ({os.path.relpath(file) if _is_below(file, os.getcwd()) else file}:{line} in {function})"


def _place(error: BaseException) -> Place | None:
    chain = list(_chain(error))
    for owner in ("user", "package"):
        for link in chain:
            places = [place for place in _places(link) if _owner(place[0]) == owner]
            if places:
                return places[-1]
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _places(error: BaseException) -> Iterator[Place]:
    """Yield the places that an error passed, from the outermost to the innermost; for an exported graph those that its
    nodes are from."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if os.path.exists(file):
            yield file, line, frame.f_code.co_name
        elif node := _executed(frame, line):
            yield from ((f, int(n), function) for f, n, function in _PLACE.findall(node.meta.get("stack_trace") or ""))


def _executed(frame: FrameType, line: int) -> Node | None:
    """Return the node that a frame of generated code was at: the line assigns to the node's name."""
    model = frame.f_locals.get("self")
    if not isinstance(model, GraphModule):
        return None
    name = linecache.getline(frame.f_code.co_filename, line).partition(" = ")[0].strip()
    return next((node for node in model.graph.nodes if node.name == name), None)


def _owner(file: str) -> str:
    """Return the owner of a file: "user", "package", "python" or "machinery"."""
    if any(_is_below(file, folder) for folder in _MACHINERY):
        return "machinery"
    if _INSTALLED & set(Path(file).parts):
        return "package"
    return "python" if any(_is_below(file, folder) for folder in _STANDARD) else "user"


def _is_below(file: str, folder: str) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


_MACHINERY = [folder for package in (torch, torchao, pt2mx, pt2mx.fx, pt2mx.pt2e) for folder in package.__path__]
_STANDARD = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
