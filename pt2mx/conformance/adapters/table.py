"""The table of adapters, and `score`, which runs them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

import numpy as np

from pt2mx.conformance.adapters.case import Case
from pt2mx.conformance.check import check
from pt2mx.conformance.claims import parse_claim
from pt2mx.conformance.examine import raised
from pt2mx.conformance.result import Conformance, Row
from pt2mx.errors import MXError, nearest


class Adapter(NamedTuple):
    """An implementation that may be installed.

    Args:
        function: "module of this folder:function", which yields the cases.
        package: the distribution whose version is stated.
        module: what must be importable.
        install: how to install it.
    """

    function: str
    package: str
    module: str
    install: str = ""


def _pip(name: str, package: str, module: str = "") -> Adapter:
    return Adapter(f"{name}:cases", package, module or name, f"pip install {package}")


#: name -> the adapter
ADAPTERS: dict[str, Adapter] = {
    "pt2mx-torch": Adapter("own:torch_cases", "pt2mx", "pt2mx"),
    "pt2mx-c++": Adapter("own:cpp_cases", "pt2mx", "pt2mx"),
    "torchao": _pip("torchao", "torchao"),
    "compressed-tensors": _pip("compressed_tensors", "compressed-tensors"),
    "gguf": _pip("gguf", "gguf"),
    "transformers": _pip("transformers", "transformers"),
    "ml_dtypes": _pip("ml_dtypes", "ml_dtypes"),
    "onnx": _pip("onnx", "onnx"),
    "openvino": _pip("openvino", "openvino"),
    "nncf": _pip("nncf", "nncf"),
    "modelopt": _pip("modelopt", "nvidia-modelopt"),
    "auto-round": _pip("auto_round", "auto-round"),
    "brevitas": _pip("brevitas", "brevitas"),
    "neural-compressor": _pip("neural_compressor", "neural-compressor-pt"),
    "quark": _pip("quark", "amd-quark"),
    "torchmx": _pip("torchmx", "torchmx"),
    "pychop": _pip("pychop", "pychop"),
    "gfloat": _pip("gfloat", "gfloat"),
    "microxcaling": Adapter(
        "microxcaling:cases",
        "microxcaling",
        "mx.mx_ops",
        "put a checkout of github.com/microsoft/microxcaling on PYTHONPATH",
    ),
}


def missing(names: Iterable[str] = ADAPTERS) -> dict[str, str]:
    """Return the implementations among `names` that are not installed, each with how to install it."""
    return {name: ADAPTERS[name].install for name in names if not _is_installed(ADAPTERS[name])}


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
    if name not in ADAPTERS:
        raise MXError(f"unknown implementation {name!r}: {nearest(name, ADAPTERS)}")
    elements = {parse_claim(format).element.name for format in formats}
    adapter = ADAPTERS[name]
    if not _is_installed(adapter):
        raise MXError(f"{name} is not installed: {adapter.install}")
    title = f"{name} {_version(adapter)}"
    module, _, function = adapter.function.partition(":")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            cases: Callable[[], Iterator[Case]] = getattr(
                importlib.import_module(f"pt2mx.conformance.adapters.{module}"), function
            )
            for case in cases():
                if not elements or case.format in elements:
                    yield _checked(title, case)
        except Exception as error:
            yield Conformance(title, "-", "-", "-", (Row("import", "-", 1, 1, example=raised(error)),))


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
