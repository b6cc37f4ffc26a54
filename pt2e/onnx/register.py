"""`register_onnx_translations`: let plain `torch.onnx.export(dynamo=True)` export converted models."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.nodes import DOMAIN


def register_onnx_translations() -> None:
    """Register ONNX translations of pt2mx's operators, so that `torch.onnx.export(dynamo=True)` takes converted models.

    The translations are added to onnxscript's registry, which torch's exporter reads. They stay registered until
    `unregister_onnx_translations` is called or the process ends. A second call has no effect.

    Every quantized tensor has the bits of pt2mx in onnxruntime. `export_onnx` writes smaller files: torch's exporter
    inlines the functions, decodes embeddings as a whole, and its optimizer decodes weights of a few kilobytes.

    Raises:
        MXError: where the extra `onnx` is not installed.

    Example:
        >>> import onnxruntime, torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> pt2mx.register_onnx_translations()
        >>> program = torch.onnx.export(converted, (x,), dynamo=True, verbose=False)
        >>> session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        >>> (y,) = session.run(None, {"input": x.numpy()})
        >>> torch.allclose(torch.from_numpy(y), converted(x), atol=1e-6)
        True
        >>> pt2mx.unregister_onnx_translations()
    """
    registry = _registry()
    for name, translation in _translations().items():
        if name not in registry or translation not in registry[name].overloads:
            registry.register(translation, name)


def unregister_onnx_translations() -> None:
    """Remove the translations that `register_onnx_translations` registered, if there are any.

    Raises:
        MXError: where the extra `onnx` is not installed.

    Example:
        >>> import pt2mx
        >>> pt2mx.register_onnx_translations()
        >>> pt2mx.unregister_onnx_translations()
    """
    registry = _registry()
    for name, translation in _translations().items():
        if name in registry and translation in registry[name].overloads:
            registry[name].overloads.remove(translation)


def _registry() -> Any:
    import_extra("onnxscript", "onnx")
    return importlib.import_module("onnxscript.function_libs.torch_lib.registration").default_registry


class _Translation:
    """A translation with the attributes that onnxscript's registry expects."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.name, self.function_ir = function.__name__, SimpleNamespace(domain=DOMAIN)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@functools.cache
def _translations() -> dict[str, _Translation]:
    from pt2mx.pt2e.onnx.translations import emit_with_body, translations

    return {operator.name(): _Translation(function) for operator, function in translations(emit_with_body).items()}
