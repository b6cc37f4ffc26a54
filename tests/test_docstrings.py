"""Docstrings: every public callable says what it takes, returns and raises, and its example gives what it shows."""

import ast
import doctest
import enum
import functools
import importlib
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._ops import OpOverload

from pt2mx.ops.contract import OPERATORS
from tests.patches import patched

ROOT = Path(__file__).parent.parent
#: pt2mx/fx and pt2mx/pt2e are links to folders next to pt2mx/
FOLDERS = {"pt2mx": ROOT / "pt2mx", "pt2mx.fx": ROOT / "fx", "pt2mx.pt2e": ROOT / "pt2e"}
MODULES = {
    ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
    if not any(link.is_symlink() for link in path.parents)
}
#: their functions take the arguments of another library's, which documents them; tests/*/test_names.py call each
SURFACES = ("pt2mx.microxcaling.", "pt2mx.pychop.", "pt2mx.quark.", "pt2mx.torchmx.", "pt2mx.pt2e.pt2bfp.")
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def has_public_names(path: Path) -> bool:
    assigned = [node.targets for node in parsed(path).body if isinstance(node, ast.Assign)]
    return any(isinstance(name, ast.Name) and name.id == "__all__" for names in assigned for name in names)


def is_ours(value: object) -> bool:
    return (inspect.isroutine(value) or inspect.isclass(value)) and (value.__module__ or "").startswith("pt2mx")


def public() -> Iterator[tuple[str, Callable]]:
    """(the name under which it is reached first, callable), the operators among them; the same object once."""
    seen = set()
    for module in MODULES:
        if not has_public_names(MODULES[module]):
            continue
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            # `partial` gives no docstring of its own: such a name fails
            if (is_ours(value) or isinstance(value, functools.partial)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module}.{name}", value
    for name in OPERATORS:
        yield f"torch.ops.pt2mx.{name}", getattr(torch.ops.pt2mx, name).default


PUBLIC = dict(public())


def methods(kind: type) -> dict[str, Callable]:
    """The public methods of a class and of pt2mx's classes that it is made of. Those that a class of another library
    prescribes are documented there."""
    by_name = {}
    for owner in (c for c in kind.__mro__ if c.__module__.startswith("pt2mx")):
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            prescribed = any(hasattr(c, name) for c in kind.__mro__ if not c.__module__.startswith("pt2mx"))
            if inspect.isfunction(function) and not name.startswith("_") and not prescribed:
                by_name.setdefault(name, function)
    return by_name


def own_docstring(value: Callable) -> str:
    """Not the one that it inherits, or that `dataclass` and `NamedTuple` make."""
    text = inspect.cleandoc(vars(value).get("__doc__") or "" if inspect.isclass(value) else value.__doc__ or "")
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text


def section(text: str, name: str) -> str:
    """The lines below the heading `name:` of a docstring, to the next heading; "" without one."""
    headings = "|".join(SECTIONS)
    match = re.search(rf"^{name}:\n((?s:.*?))(?=^(?:{headings}):$|\Z)", text, re.MULTILINE)
    return match[1] if match else ""


def parameters(value: Callable) -> list[str]:
    """Those that a caller gives, without `self`, `cls`, and `*args` and `**kwargs` that are passed on."""
    if inspect.isclass(value) and issubclass(value, enum.Enum | BaseException):
        return []
    if isinstance(value, OpOverload):
        return [argument.name for argument in value._schema.arguments]
    names = inspect.signature(value).parameters
    return [name for name in names if name not in ("self", "cls", "args", "kwargs") and not name.startswith("_")]


def returns_something(function: Callable) -> bool:
    if isinstance(function, OpOverload):
        return bool(function._schema.returns)
    return inspect.get_annotations(inspect.unwrap(function)).get("return") not in (None, "None")


def own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """What a function's body holds, without the functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from own_statements(child)


def raises(value: Callable) -> bool:
    functions = [value]
    if inspect.isclass(value):
        functions = [vars(value)[name] for name in ("__new__", "__init__", "__post_init__") if name in vars(value)]
    functions = [inspect.unwrap(getattr(f, "__func__", f)) for f in functions]
    functions = [f for f in functions if getattr(f, "__module__", "").startswith("pt2mx") and hasattr(f, "__code__")]
    return any(isinstance(node, ast.Raise) for f in functions if (tree := body(f)) for node in own_statements(tree))


def body(function: Callable) -> ast.AST | None:
    if function.__code__.co_filename.startswith("<"):  # made by `dataclass`
        return None
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def faults(value: Callable, name: str, as_method: bool = False) -> list[str]:
    text = own_docstring(value)
    if not text:
        return [f"{name}: no docstring"]
    if name.startswith(SURFACES):
        return []
    missing = [p for p in parameters(value) if not re.search(rf"\b{re.escape(p)}\b", section(text, "Args"))]
    missing_sections = [f"{name}: Args without {', '.join(missing)}"] if missing else []
    if not inspect.isclass(value) and returns_something(value) and not section(text, "Returns"):
        missing_sections.append(f"{name}: no Returns")
    if raises(value) and not section(text, "Raises"):
        missing_sections.append(f"{name}: no Raises")
    if not as_method and ">>> " not in section(text, "Example"):
        missing_sections.append(f"{name}: no Example")
    return missing_sections


@pytest.mark.parametrize("name", PUBLIC)
def test_sections(name):
    value = PUBLIC[name]
    missing = faults(value, name)
    if inspect.isclass(value):
        for method, function in methods(value).items():
            missing += faults(function, f"{name}.{method}", as_method=True)
    assert not missing


def examples() -> Iterator[tuple[str, str]]:
    for name, value in PUBLIC.items():
        of_methods = methods(value) if inspect.isclass(value) else {}
        for label, function in {name: value, **{f"{name}.{m}": f for m, f in of_methods.items()}}.items():
            if ">>> " in own_docstring(function):
                yield label, own_docstring(function)


#: they build a library that tests/pt2mx/cpp builds, too, do with a language model what the example of
#: `quantize_language_model` does, or quantize whole models as the tests of these functions do
_SLOW = {
    *("pt2mx.cpp.build", "pt2mx.cpp.cmake_lines", "pt2mx.cpp.library_path"),
    *("pt2mx.LanguageModel", "pt2mx.slice_language_model", "pt2mx.load_checkpoint", "pt2mx.save_checkpoint"),
    *("pt2mx.MXExportQuantizer", "pt2mx.compare_recipes", "pt2mx.quark.ModelQuantizer", "pt2mx.quantize_onnx"),
    *("pt2mx.export_onnx", "pt2mx.register_onnx_translations", "pt2mx.quantize_language_model", "pt2mx.lower_to_aten"),
}


@pytest.fixture(scope="module")
def _nothing_stays_patched_by_examples():
    """A walk through all modules of torch takes as long as an example."""
    yield
    assert not patched()


@pytest.mark.usefixtures("_nothing_stays_patched_by_examples")
@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * (row[0] in _SLOW)) for row in examples()],
)
def test_example(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=OPTIONS).run(test, out=said.append)
    assert not said, "".join(said)
    assert not list(tmp_path.iterdir()), "files left behind"
