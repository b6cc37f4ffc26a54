"""`Switched`: the flags of the modules of a prepared model, which `pt2mx.pt2e.observe.switches` sets."""

from __future__ import annotations

import torch
from torch import nn


class Switched(nn.Module):
    """A module that emulates the converted model, and collects statistics, while its flags say so."""

    fake_quant_enabled: bool
    observer_enabled: bool
    _FLAGS = ("fake_quant_enabled", "observer_enabled")

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Switch fake quantization.

        Args:
            enabled: True for quantized values, False for the unchanged tensor.
        """
        self.fake_quant_enabled = bool(enabled)

    def disable_fake_quant(self) -> None:
        """Pass tensors through unchanged."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Switch the collection of statistics.

        Args:
            enabled: True to collect them.
        """
        self.observer_enabled = bool(enabled)

    def disable_observer(self) -> None:
        """Collect no statistics."""
        self.enable_observer(False)

    # The flags go into the state_dict under the names and dtype that torchao's FakeQuantize gives them.
    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for flag in self._FLAGS:
            destination[prefix + flag] = torch.tensor([getattr(self, flag)], dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for flag in self._FLAGS:
            if prefix + flag in state_dict:
                setattr(self, flag, bool(state_dict.pop(prefix + flag)))
        super()._load_from_state_dict(state_dict, prefix, *args)
