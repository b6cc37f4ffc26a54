"""Switch fake quantization and the collection of statistics of a prepared model on and off."""

from __future__ import annotations

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.observe.flags import Switched
from pt2mx.pt2e.observe.torchao_pt2e import is_prepared


def _observers(model: nn.Module) -> list[Switched]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    observers = [module for module in modules if isinstance(module, Switched)]
    if not observers and not is_prepared(model):
        raise MXError("the model holds no MX observer: pass what prepare_pt2e or prepare_qat_pt2e returned")
    return observers


def enable_fake_quant(model: nn.Module) -> None:
    """Make a prepared model compute with quantized values, bit-identical to the converted model.

    Args:
        model: a result of `prepare_pt2e` or `prepare_qat_pt2e`, or a module that contains it.

    Raises:
        MXError: for a model without MX observers.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> pt2mx.enable_fake_quant(prepared)
        >>> torch.equal(prepared(x), pt2mx.convert_pt2e(prepared)(x))
        True
        >>> torch.equal(prepared(x), exported(x))
        False
    """
    for observer in _observers(model):
        observer.enable_fake_quant()


def disable_fake_quant(model: nn.Module) -> None:
    """Make a prepared model compute in high precision.

    Args:
        model: as in `enable_fake_quant`.

    Raises:
        MXError: as `enable_fake_quant`.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8), (x,)).module()
        >>> qat = pt2mx.prepare_qat_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> pt2mx.disable_fake_quant(qat)
        >>> torch.equal(qat(x), exported(x))
        True
    """
    for observer in _observers(model):
        observer.disable_fake_quant()


def enable_observer(model: nn.Module) -> None:
    """Make a prepared model collect statistics.

    Args:
        model: as in `enable_fake_quant`.

    Raises:
        MXError: as `enable_fake_quant`.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8), (x,)).module()
        >>> qat = pt2mx.prepare_qat_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
        >>> pt2mx.enable_observer(qat)  # training collects none by default
        >>> _ = qat(x)
        >>> sorted(o.statistics.values for o in qat.modules() if isinstance(o, pt2mx.MXObserver))  # x and the weight
        [64, 512]
    """
    for observer in _observers(model):
        observer.enable_observer()


def disable_observer(model: nn.Module) -> None:
    """Stop a prepared model from collecting statistics; it then runs faster.

    Args:
        model: as in `enable_fake_quant`.

    Raises:
        MXError: as `enable_fake_quant`.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
        >>> pt2mx.disable_observer(prepared)
        >>> _ = prepared(x)
        >>> [o.statistics for o in prepared.modules() if isinstance(o, pt2mx.MXObserver)]
        [None, None]
    """
    for observer in _observers(model):
        observer.disable_observer()
