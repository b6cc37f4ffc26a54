"""torchao's `QuantizationSpec` with the identity of an MX spec in its `qscheme`.

torchao shares one observer between the consumers of a tensor whose specs agree on dtype, quant_min, quant_max, qscheme
and ch_axis. MX specs differ in element, block, axis and modes instead, so all of those sit in `qscheme`.
"""

from collections.abc import Callable

import torch

from pt2mx.pt2e.torchao_pt2e import QuantizationSpec
from pt2mx.spec import MXSpec

_TAG = "mx"


def mx_qspec(spec: MXSpec, constructor: Callable, ste: str = "identity") -> QuantizationSpec:
    """The annotation of a tensor; `constructor` is the observer or fake-quantize class, `ste` what becomes of the
    gradient in training. `spec.axis` counts from the front, so that equal specs compare equal."""
    return QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=constructor,
        qscheme=mx_qscheme(spec, ste),
    )


def mx_qscheme(spec: MXSpec, ste: str = "identity") -> tuple:
    """The identity of a quantized tensor: observers are shared where it is equal."""
    return (_TAG, *spec.op_args(), ste)


def spec_of_qscheme(qscheme: tuple) -> MXSpec:
    """The MX spec in a `qscheme`."""
    return MXSpec(*qscheme[1:6])


def ste_of_qscheme(qscheme: tuple) -> str:
    """The estimator of the gradient, "identity" where a `qscheme` names none."""
    return (*qscheme, "identity")[6]


def mx_spec(qspec: object) -> MXSpec | None:
    """The MX spec of a torchao annotation, None for another library's."""
    qscheme = getattr(qspec, "qscheme", None)
    return spec_of_qscheme(qscheme) if isinstance(qscheme, tuple) and qscheme[:1] == (_TAG,) else None
