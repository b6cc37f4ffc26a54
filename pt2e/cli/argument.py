"""Arguments of commands as data, so that a command line is checked before torch is imported, which takes seconds.

The modules of the tables import no torch. The choices that are names of the Python API are repeated here for that
reason; a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """The arguments of a call of `argparse.ArgumentParser.add_argument`."""

    names: tuple[str, ...]
    options: dict[str, Any]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument, given as to `add_argument`."""
    return Argument(names, options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return argument(name, action="store_true", help=text)


def device(meaning: str) -> Argument:
    """Return the option `--device`."""
    return argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"{meaning} (default: cpu)")


PRESETS = ("fast", "balanced", "best")
METRICS = ("kl", "cosine", "noise")
METHODS = ("forward", "gradient", "both")
OPERANDS = ("both", "weights", "activations")
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("compressed-tensors", "mxfp4", "quark", "modelopt", "fp8")
TARGETS = ("pt2mx", "quark", "standard")
OPSETS = (18, 25)
#: formats that `compare` tries without a recipe
OTHER_FORMATS = ("mxfp8_e5m2", "mxfp6_e3m2")

#: operators in the summary of `quantize`, and rows of `sensitivity`, without `--full`
WORST_OPERATORS, WORST_ROWS = 10, 20
#: the folder that `demo` writes
DEMO_FOLDER = "pt2mx-demo"

#: of every command
COMMON = (
    flag("--json", "print the result as one JSON object"),
    flag("--traceback", "print where an error arose, to its cause"),
)
