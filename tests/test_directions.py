"""Imports point one way: down the layers, and down the folders of `pt2e/`.

An import counts wherever it stands: in a function, under TYPE_CHECKING, or as the name of a module in a string.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: layer -> its folder, the lowest first
LAYERS = {"pt2mx": ROOT / "pt2mx", "pt2mx.fx": ROOT / "fx", "pt2mx.pt2e": ROOT / "pt2e"}
#: the folders of `pt2e/`, the highest first
FOLDERS = (
    "cli",
    "page",
    "sensitivity",
    "debug",
    "exporters",
    "onnx",
    "pt2bfp",
    "report",
    "inspect",
    "checkpoints",
    "lora",
    "language",
    "optimize",
    "executorch",
    "aten",
    "packages",
    "flow",
    "program",
    "quantizer",
    "models",
    "observe",
    "files",
)
#: results that draw themselves, above them, when they are asked to
DRAWN = {("report", "page"), ("debug", "page")}
#: the flat API, old names and the command, which name all layers; Quark's surface over the flow
ENTRANCES = {"pt2mx", "pt2mx.__main__", "pt2mx.entrypoint", "pt2mx.deprecated", "pt2mx.quark.quantize_model"}
#: a module in a string, perhaps with a name in it
_MODULE = re.compile(r"(pt2mx(?:\.\w+)+)(?::\w+)?")


def modules() -> dict[str, Path]:
    """Return module -> file of all layers."""
    found = {}
    for package, folder in LAYERS.items():
        for path in folder.rglob("*.py"):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports(module: str, of_types: bool = True) -> set[str]:
    """Return the modules that a module imports.

    Args:
        module: the module.
        of_types: False: without what type checkers alone read.
    """
    tree = ast.parse(MODULES[module].read_text())
    if not of_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
    return {name for node in ast.walk(tree) for name in _named(node)} - {module}


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else str(node.module)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = _MODULE.fullmatch(node.value)
        if named and named[1] in MODULES:
            yield named[1]


def layer_of(module: str) -> int:
    return max(i for i, package in enumerate(LAYERS) if f"{module}.".startswith(f"{package}."))


def folder_of(module: str) -> str | None:
    """Return the folder of `pt2e/` that holds a module."""
    return module.split(".")[2] if module.startswith("pt2mx.pt2e.") else None


def test_each_folder_has_a_place():
    assert sorted(FOLDERS) == sorted({path.parent.name for path in (ROOT / "pt2e").glob("*/__init__.py")})


def test_pt2e_holds_folders_alone():
    assert [path.name for path in (ROOT / "pt2e").glob("*.py")] == ["__init__.py"]


def test_imports_point_down():
    for module in MODULES.keys() - ENTRANCES:
        for imported in imports(module) & MODULES.keys() - ENTRANCES:
            assert layer_of(imported) <= layer_of(module), (module, imported)
            own, other = folder_of(module), folder_of(imported)
            if own and other and (own, other) not in DRAWN:
                assert FOLDERS.index(own) <= FOLDERS.index(other), (module, imported)


def test_what_draws_is_imported_in_functions():
    for module in MODULES:
        tree = ast.parse(MODULES[module].read_text())
        above = {name for node in tree.body for name in _named(node) if (folder_of(module), folder_of(name)) in DRAWN}
        assert not above, module


def test_no_module_imports_itself_through_others():
    graph = {name: imports(name, of_types=False) & MODULES.keys() for name in MODULES.keys() - ENTRANCES}
    # its default observer, and the subclasses that it makes, imported when it is called
    graph["pt2mx.pt2e.observe.qspec"] -= {"pt2mx.pt2e.observe.observer"}
    graph["pt2mx.pt2e.language.language_model"] -= {"pt2mx.pt2e.language.encoder_decoder"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


def test_one_file_of_the_flow_imports_torchao():
    for module in MODULES:
        if module != "pt2mx.pt2e.observe.torchao_pt2e" and layer_of(module):
            assert not any(name.startswith(("torchao", "torch.ao")) for name in imports(module)), module
