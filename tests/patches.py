"""What is patched: functions of torch, torchao, transformers and others that these libraries did not define."""

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType

LIBRARIES = {"torch", "torchao", "torchvision", "transformers", "onnx", "onnxscript", "safetensors", "gguf"}
#: a function of the libraries that these define is a patch
OURS = {"pt2mx", "tests"}
#: modules that torch makes of generated code, and its namespaces of operators, which hold ours
GENERATED = ("torch._inductor.runtime.compile_tasks", "torch.ops", "torch._ops")


def patched() -> list[str]:
    """Return "module.class.name by definer" of each function, method, property or class that ours has replaced or added
    in a module or class of the libraries."""
    patches = ((name, definer(value)) for name, value in _attributes())
    return sorted(f"{name} by {by}" for name, by in patches if by.partition(".")[0] in OURS)


def definer(value: object) -> str:
    """Return the module that defines a function, whatever its `__module__` says, or the type of another value."""
    if type(value) is property:
        return definer(value.fget)
    if type(value) is functools.partial:
        return definer(value.func)
    if type(value) in (staticmethod, classmethod, MethodType):
        return definer(value.__func__)
    if type(value) is FunctionType:
        return str(value.__globals__.get("__name__"))
    return value.__module__ if issubclass(type(value), type) else type(value).__module__


def _attributes() -> Iterator[tuple[str, object]]:
    """(module.name, value) of the functions of a module, (module.class.name, value) of the members of its classes."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in LIBRARIES or module_name.startswith(GENERATED):
            continue
        for name, value in list(vars(module).items()):
            if not issubclass(type(value), type):  # a proxy's `__class__` would load what it stands for
                yield f"{module_name}.{name}", value
            elif value.__module__ == module_name:
                yield from ((f"{module_name}.{name}.{member}", of) for member, of in list(vars(value).items()))
