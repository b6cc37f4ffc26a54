"""The table of implementations that may be installed (ADAPTERS), and `score`, which checks one."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

import numpy as np

from mx_conformance import libraries, result
from mx_conformance.check import check
from mx_conformance.conventions import parse_claim
from mx_conformance.errors import MXError, nearest
from mx_conformance.examine import raised
from mx_conformance.libraries import Case
from mx_conformance.result import Conformance, Row


class Adapter(NamedTuple):
    """An implementation that may be installed.

    Args:
        cases: yields the cases.
        package: the distribution whose version is stated.
        module: what must be importable.
        install: how to install it; by default by pip.
    """

    cases: Callable[[], Iterator[Case]]
    package: str
    module: str
    install: str = ""

    @property
    def how_to_install(self) -> str:
        """The command that installs it."""
        return self.install or f"pip install {self.package}"


#: name -> the adapter
ADAPTERS: dict[str, Adapter] = {
    "pt2mx-torch": Adapter(libraries.pt2mx_torch, "pt2mx", "pt2mx"),
    "pt2mx-c++": Adapter(libraries.pt2mx_cpp, "pt2mx", "pt2mx"),
    "torchao": Adapter(libraries.torchao, "torchao", "torchao"),
    "compressed-tensors": Adapter(libraries.compressed_tensors, "compressed-tensors", "compressed_tensors"),
    "gguf": Adapter(libraries.gguf, "gguf", "gguf"),
    "transformers": Adapter(libraries.transformers, "transformers", "transformers"),
    "ml_dtypes": Adapter(libraries.ml_dtypes, "ml_dtypes", "ml_dtypes"),
    "onnx": Adapter(libraries.onnx, "onnx", "onnx"),
    "openvino": Adapter(libraries.openvino, "openvino", "openvino"),
    "nncf": Adapter(libraries.nncf, "nncf", "nncf"),
    "modelopt": Adapter(libraries.modelopt, "nvidia-modelopt", "modelopt"),
    "auto-round": Adapter(libraries.auto_round, "auto-round", "auto_round"),
    "brevitas": Adapter(libraries.brevitas, "brevitas", "brevitas"),
    "neural-compressor": Adapter(libraries.neural_compressor, "neural-compressor-pt", "neural_compressor"),
    "quark": Adapter(libraries.quark, "amd-quark", "quark"),
    "torchmx": Adapter(libraries.torchmx, "torchmx", "torchmx"),
    "pychop": Adapter(libraries.pychop, "pychop", "pychop"),
    "gfloat": Adapter(libraries.gfloat, "gfloat", "gfloat"),
    "microxcaling": Adapter(
        libraries.microxcaling,
        "microxcaling",
        "mx.mx_ops",
        "put a checkout of github.com/microsoft/microxcaling on PYTHONPATH",
    ),
}


def select(names: Iterable[str] = (), formats: Iterable[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Return the implementations that are installed, and how to install the others, by name.

    Args:
        names: keys of `ADAPTERS`; none for all.
        formats: formats to check the spelling of.

    Raises:
        MXError: for an unknown name or format.
    """
    for format in formats:
        parse_claim(format)
    installed, absent = [], {}
    for name in names or ADAPTERS:
        if name not in ADAPTERS:
            raise MXError(f"unknown implementation {name!r}: {nearest(name, ADAPTERS)}")
        if _is_installed(ADAPTERS[name]):
            installed.append(name)
        else:
            absent[name] = ADAPTERS[name].how_to_install
    return installed, absent


def score(name: str, formats: Iterable[str] = ()) -> Iterator[Conformance]:
    """Check an installed implementation in each of its formats and scale rules.

    Args:
        name: a key of `ADAPTERS`.
        formats: the formats to check; by default all.

    Yields:
        A result for each case. A case that does not run has one row, with what was raised.

    Raises:
        MXError: for an unknown name or format, and an implementation that is not installed.
    """
    elements = {parse_claim(format).element.name for format in formats}
    _, absent = select([name])
    if absent:
        raise MXError(f"{name} is not installed: {absent[name]}")
    adapter = ADAPTERS[name]
    title = f"{name} {_version(adapter)}"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            for case in adapter.cases():
                if not elements or case.format in elements:
                    yield _checked(title, case)
        except Exception as error:
            yield Conformance(title, "-", "-", "-", (Row("import", "-", 1, 1, example=raised(error)),))


def report(results: Sequence[Conformance], absent: dict[str, str]) -> tuple[str, dict[str, object]]:
    """Return results, and what `select` says of the implementations that are not installed, as text and as data."""
    lines = [f"{name} is not installed: {install}" for name, install in absent.items()]
    data: dict[str, object] = {"results": [each.to_dict() for each in results], "not_installed": absent}
    return "\n".join(filter(None, [result.text(results), *lines])), data


def _checked(title: str, case: Case) -> Conformance:
    arguments = case._asdict()
    variant = arguments.pop("variant")
    name = f"{title} ({variant})" if variant else title
    try:
        return check(**arguments, name=name)
    except MXError as error:
        return Conformance(
            name,
            f"mx{case.format}",
            case.scale_mode or "-",
            "-",
            (Row("first call", "-", 1, 1, example=raised(error)),),
        )


def _is_installed(adapter: Adapter) -> bool:
    root = adapter.module.partition(".")[0]
    return importlib.util.find_spec(root) is not None and importlib.util.find_spec(adapter.module) is not None


def _version(adapter: Adapter) -> str:
    try:
        return metadata.version(adapter.package)
    except metadata.PackageNotFoundError:
        return "(source)"
