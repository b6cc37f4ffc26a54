"""The modules and classes that pickles of older versions name, and their names today.

Add a row for each class whose objects users pickle, where it or its module gets another name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: old module -> the module that has its classes now
MODULES: dict[str, str] = {
    "pt2mx.preset": "pt2mx.compat",
    "pt2mx.pt2e.collector": "pt2mx.pt2e.observe.observer",
    "pt2mx.pt2e.debug.comparison": "pt2mx.pt2e.debug.errors",
    "pt2mx.pt2e.debug.differences": "pt2mx.pt2e.debug.errors",
    "pt2mx.pt2e.fake_quantize": "pt2mx.pt2e.observe.fake_quantize",
    "pt2mx.pt2e.format_observer": "pt2mx.pt2e.observe.format_observer",
    "pt2mx.pt2e.language.perplexity": "pt2mx.pt2e.language.texts",
    "pt2mx.pt2e.observer": "pt2mx.pt2e.observe.observer",
    "pt2mx.pt2e.onnx.float_report": "pt2mx.pt2e.onnx.quantize.quantize_onnx",
    "pt2mx.pt2e.optimize.hessian_observer": "pt2mx.pt2e.optimize.observers",
    "pt2mx.pt2e.optimize.index_observer": "pt2mx.pt2e.optimize.observers",
    "pt2mx.pt2e.origin": "pt2mx.pt2e.program.provenance",
    "pt2mx.pt2e.packed_weights": "pt2mx.pt2e.flow.packed_weights",
    "pt2mx.pt2e.provenance": "pt2mx.pt2e.program.provenance",
    "pt2mx.pt2e.range_observers": "pt2mx.pt2e.observe.range_observers",
    "pt2mx.pt2e.report.agreement": "pt2mx.analysis.agreement",
    "pt2mx.pt2e.report.fidelity": "pt2mx.analysis.agreement",
    "pt2mx.pt2e.sensitivity.recipe_comparison": "pt2mx.pt2e.report.results",
    "pt2mx.pt2e.sensitivity.result": "pt2mx.pt2e.report.results",
    "pt2mx.pt2e.sensitivity.results": "pt2mx.pt2e.report.results",
    "pt2mx.pt2e.tensor_scales": "pt2mx.pt2e.observe.tensor_scales",
    "pt2mx.quark.enums": "pt2mx.quark.attributes",
    "pt2mx.torchmx.dynamic_weights": "pt2mx.torchmx.quant_api",
}

#: old module:class -> the class's name today
CLASSES: dict[str, str] = {
    "pt2mx.pt2e.debug.comparison:Compared": "OperatorErrors",
    "pt2mx.pt2e.debug.differences:Difference": "ErrorSums",
    "pt2mx.pt2e.origin:Origin": "Provenance",
}


def install() -> None:
    """Make the old modules importable."""
    sys.meta_path.append(_OldModules())


class _OldModules(MetaPathFinder, Loader):
    """Import an old module: its attributes are the new module's."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, importlib.import_module(MODULES[module.__name__])

        def __getattr__(name: str) -> object:
            return getattr(new, CLASSES.get(f"{old}:{name}", name))

        vars(module)["__getattr__"] = __getattr__
