"""What the layers share: specs of their own, which may be changed later."""

from __future__ import annotations

from collections.abc import Mapping

from pt2mx.microxcaling.specs import apply_mx_specs, mx_assert_test


class MxLayer:
    """Before a class of torch's layers: that layer with `mx_specs`; with None it computes as torch's.

    `name` is a label that changes nothing.
    """

    def __init__(
        self, *args: object, mx_specs: Mapping[str, object] | None = None, name: str | None = None, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self.name = name
        self.apply_mx_specs(mx_specs)

    def apply_mx_specs(self, mx_specs: Mapping[str, object] | None) -> None:
        """Take other specs."""
        mx_assert_test(mx_specs)
        self.mx_none = mx_specs is None
        self.mx_specs = apply_mx_specs(mx_specs)

    def append_name(self, postfix: str) -> None:
        """Add to the label."""
        self.name = (self.name or "") + postfix
