"""The base of all layers: specs of their own, which may be changed later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test


class MxLayer:
    """Before a class of torch's layers: that layer with `mx_specs`; with None it computes as torch's.

    `name` is a label that changes nothing.
    """

    def __init__(
        self, *args: Any, mx_specs: Mapping[str, object] | None = None, name: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.name = name
        self.apply_mx_specs(mx_specs)

    def apply_mx_specs(self, mx_specs: Mapping[str, object] | None) -> None:
        """Take other specs.

        Args:
            mx_specs: as the layer's own.

        Raises:
            MXError: for an unknown key.
        """
        mx_assert_test(mx_specs)
        self.mx_none = mx_specs is None
        self.mx_specs = apply_mx_specs(mx_specs)

    def append_name(self, postfix: str) -> None:
        """Add to the label.

        Args:
            postfix: what is added at its end.
        """
        self.name = (self.name or "") + postfix
