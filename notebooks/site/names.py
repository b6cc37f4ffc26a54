"""The public names of pt2mx by the modules that define them, and the pages that document them."""

import ast
import inspect
import re
from pathlib import Path

import pt2mx


def modules(text: str) -> list[str]:
    """Return the modules that the directives `names` of a text name."""
    return re.findall(r"\S+", " ".join(re.findall(r"^```\{names\} (.*)$", text, re.MULTILINE)))


def contents(of_modules: list[str]) -> str:
    """Return tables of the public names of modules, and the navigation to their pages, in MyST."""
    lines = ["| name | |", "|---|---|"]
    for module in of_modules:
        for name in defined_in(module):
            lines.append(f"| {{py:obj}}`{name} <{_documented(name)}>` | {summary(name)} |")
    toctree = ["```{toctree}", ":hidden:", *(f"api/{module}" for module in of_modules), "```"]
    return "\n".join([*lines, "", *toctree])


def page(module: str) -> str:
    """Return the page that documents the public names of a module, in MyST."""
    directives = map(directive, defined_in(module))
    return "\n".join([f"# {module}", "", "```{eval-rst}", *directives, "```", ""])


def public_names() -> dict[str, str]:
    """Return each public name with the module that defines it."""
    stub = Path(inspect.getfile(pt2mx)).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = [(alias.asname or alias.name, str(node.module)) for node in imports for alias in node.names]
    return {name: module if module != "pt2mx" else f"pt2mx.{name}" for name, module in names}


def defined_in(module: str) -> list[str]:
    """Return the public names that a module or a module of a package defines."""
    return [name for name, defining in public_names().items() if f"{defining}.".startswith(f"{module}.")]


def summary(name: str) -> str:
    """Return the first line of the docstring of a public name, or the first sentence of the comment above it."""
    value = getattr(pt2mx, name)
    if inspect.ismodule(value) or callable(value):
        return inspect.getdoc(value).splitlines()[0]
    from sphinx.pycode import ModuleAnalyzer  # of the extra `docs`

    comments = ModuleAnalyzer.for_module(public_names()[name]).find_attr_docs()
    return " ".join(comments["", name]).partition(". ")[0]


def directive(name: str) -> str:
    """Return the directive of Sphinx that documents a public name by its docstring, or by the comment above it."""
    value = getattr(pt2mx, name)
    if inspect.ismodule(value):
        return f".. automodule:: {_documented(name)}\n"
    if inspect.isclass(value):
        return f".. autoclass:: {_documented(name)}\n   :members: {', '.join(_members(value))}\n"
    if callable(value):
        return f".. autofunction:: {_documented(name)}\n"
    return f".. autodata:: {_documented(name)}\n   :no-value:\n"


def _documented(name: str) -> str:
    """Return the full name by which the pages document a public name: of data where its comment is."""
    value = getattr(pt2mx, name)
    if inspect.ismodule(value):
        return value.__name__
    return f"pt2mx.{name}" if callable(value) else f"{public_names()[name]}.{name}"


def _members(value: type) -> list[str]:
    """Return the public members of a class with a docstring of their own, also those of bases in pt2mx."""
    bases = [base for base in reversed(value.__mro__) if base.__module__.startswith("pt2mx")]
    members = {name: member for base in bases for name, member in vars(base).items() if not name.startswith("_")}
    return [name for name, member in members.items() if getattr(member, "__doc__", None)]
