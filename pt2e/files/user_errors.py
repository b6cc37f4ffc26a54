"""Report errors of other code (a model's, torch's) to the user in one line: type, message and source location."""

from __future__ import annotations

import io
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import torch
from torch.fx import GraphModule, Node

import pt2mx.fx
import pt2mx.pt2e
from pt2mx.errors import MXError

#: advice for a checkpoint whose model cannot be exported
WITHOUT_EXPORT = (
    "quantize it without an export, by `pt2mx convert-checkpoint`, or by PT2MXConfig while transformers loads it"
)
#: longest message in one line; the traceback has all of it
_LONGEST = 300
#: how torch begins the explanation, of many lines, that follows the message of an export error
_ESSAY = re.compile(
    r"\s*(\(unhinted: |\(Size-like symbols: |consider using data-dependent friendly|Caused by: |"
    r"For more information, run with TORCH_LOGS|The following call raised this error|"
    r"The error above occurred when calling|from user code:|"
    r"Set TORCHDYNAMO_VERBOSE|Hint: |Developer debug context: )"
)
#: what the error of a call says of a size that the export fixed
_FIXED_SIZE = re.compile(r"Guard failed: .*\.size\(\)|Got invalid dimensions for input")
OTHER_SIZES = "sizes are those of the example: export the model with dynamic_shapes for others"
#: how an interpreter of graphs continues the message of an error
_AT_NODE = "\n\nWhile executing %"
#: a location in a node's `stack_trace`, innermost last
_LOCATION = re.compile(r'File "(.+)", line (\d+), in (\S+)')
#: folders of installed packages
_INSTALLED = {"site-packages", "dist-packages"}

#: file, line, function
Location = tuple[str, int, str]


@contextmanager
def user_errors(what: str, instead: str = "") -> Iterator[None]:
    """Turn any exception of the block into an `MXError` of one line.

    Args:
        what: what the block does, as in "could not load the model".
        instead: what the user can do where the block fails.

    Raises:
        MXError: for any exception of the block; an MXError passes unchanged.
    """
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        raise MXError(f"could not {what}: {one_line(error)}" + (f"; {instead}" if instead else "")) from error


@contextmanager
def quiet_export() -> Iterator[None]:
    """Delay torch's log and stderr until the block succeeds, and drop both where it fails: `one_line` tells the error.

    With TORCH_LOGS in the environment nothing is delayed."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    delayed = io.StringIO()
    with ExitStack() as stack:
        for handler in _log_handlers():
            stack.callback(handler.setStream, handler.setStream(delayed))
        stack.enter_context(redirect_stderr(delayed))
        yield
    sys.stderr.write(delayed.getvalue())


def _log_handlers() -> list[logging.StreamHandler]:
    """Return the handlers that print the records of torch's loggers."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]  # not files and traces


def one_line(error: BaseException) -> str:
    """Return an error as `TypeError: can only add tensors (net.py:12 in forward)`.

    The lines of the message are joined. Torch's explanations are cut, and so is what exceeds 300 characters. Of a size
    that the export fixed, the text says how to export others. The location is the innermost one in the user's code, or
    else the innermost one in an installed package except torch.
    """
    lines = [line.strip() for line in str(error).partition(_AT_NODE)[0].splitlines()]
    message = " ".join(line for line in lines if line)
    message = message[: essay.start()] if (essay := _ESSAY.search(message, 1)) else message
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST].rstrip()} ... (--traceback prints the whole)"
    if _FIXED_SIZE.search(message):
        message += f"; {OTHER_SIZES}"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    location = None if isinstance(error, SyntaxError) else _location(error)  # its message has the location already
    if location is None:
        return text
    file, line, function = location
    return f"{text} ({os.path.relpath(file) if _is_below(file, os.getcwd()) else file}:{line} in {function})"


def _location(error: BaseException) -> Location | None:
    chain = list(_chain(error))
    for owner in ("user", "package"):
        for link in chain:
            locations = [location for location in _locations(link) if _owner(location[0]) == owner]
            if locations:
                return locations[-1]
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _locations(error: BaseException) -> Iterator[Location]:
    """Yield the locations of a traceback, outermost first. The locations of a node of an exported graph come from its
    meta."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if os.path.exists(file):
            yield file, line, frame.f_code.co_name
        elif node := _executed(frame, line):
            trace = node.meta.get("stack_trace") or ""
            yield from ((file, int(number), function) for file, number, function in _LOCATION.findall(trace))


def _executed(frame: FrameType, line: int) -> Node | None:
    """Return the node that a frame of generated code executed: the line assigns to the node's name."""
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


#: found without an import: torchao takes a second
_TORCHAO = find_spec("torchao")
_MACHINERY = [folder for package in (torch, pt2mx, pt2mx.fx, pt2mx.pt2e) for folder in package.__path__]
_MACHINERY += (_TORCHAO and _TORCHAO.submodule_search_locations) or []
_STANDARD = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
