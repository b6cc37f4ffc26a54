"""The public names of pt2mx by the modules that define them, and the directives that document them."""

import ast
import inspect
from pathlib import Path

import pt2mx


def public_names() -> dict[str, str]:
    """Return each public name with the module that defines it."""
    stub = Path(inspect.getfile(pt2mx)).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = [(alias.asname or alias.name, str(node.module)) for node in imports for alias in node.names]
    return {name: module if module != "pt2mx" else f"pt2mx.{name}" for name, module in names}


def defined_in(prefixes: list[str]) -> list[str]:
    """Return the public names that modules with one of the prefixes define."""
    return [name for name, module in public_names().items() if module.startswith(tuple(prefixes))]


def directive(name: str) -> str:
    """Return the directive of Sphinx that documents a public name by its docstring, or by the comment above it."""
    value = getattr(pt2mx, name)
    if inspect.ismodule(value):
        return f".. automodule:: {value.__name__}\n"
    if inspect.isclass(value):
        return f".. autoclass:: pt2mx.{name}\n   :members: {', '.join(_members(value))}\n"
    if callable(value):
        return f".. autofunction:: pt2mx.{name}\n"
    return f".. autodata:: {public_names()[name]}.{name}\n   :no-value:\n"


def _members(value: type) -> list[str]:
    """Return the public members of a class with a docstring of their own, also those of bases in pt2mx."""
    bases = [base for base in reversed(value.__mro__) if base.__module__.startswith("pt2mx")]
    members = {name: member for base in bases for name, member in vars(base).items() if not name.startswith("_")}
    return [name for name, member in members.items() if getattr(member, "__doc__", None)]
