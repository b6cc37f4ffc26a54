"""Calibrate static tensor scales alone, for models that are compared and not reported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.pt2e.debug.batches import call
from pt2mx.pt2e.observe.observer import MXObserver


def calibrate_tensor_scales(prepared: GraphModule, batches: Iterable[Any]) -> None:
    """Run batches through a prepared model if static tensor scales follow from them, without the statistics of other
    calibration; other formats need no batch.

    Raises:
        MXError: if static tensor scales follow from batches, and there is none.
    """
    observers = [module for module in prepared.modules() if isinstance(module, MXObserver)]
    static = [observer for observer in observers if observer.static_scale is not None]
    if not static:
        return
    enabled = [observer for observer in observers if observer.observer_enabled]
    with ExitStack() as stack, torch.no_grad():
        for observer in enabled:
            observer.disable_observer()
            stack.callback(observer.enable_observer)
        for observer in static:
            stack.callback(observer.register_forward_pre_hook(_observe).remove)
        for batch in batches:
            call(prepared, batch)
    if not any(observer.static_scale and observer.static_scale.observed for observer in static):
        raise MXError(
            f"static tensor scales of {static[0].spec} follow from batches, and none reached a tensor: give batches, "
            "or choose tensor_scale='dynamic'"
        )


def _observe(observer: Any, args: tuple[Any, ...]) -> None:
    observer.static_scale.observe(args[0])
