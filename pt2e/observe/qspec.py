"""MX specs as torchao's `QuantizationSpec`: the whole spec is in `qscheme`.

torchao shares one observer between the users of a tensor whose specs agree on dtype, quant_min, quant_max, qscheme and
ch_axis. MX specs differ in element, block, axis, modes and scale format instead, so `qscheme` contains all of those.
"""

import functools
from collections.abc import Callable

import torch

from pt2mx.errors import MXError
from pt2mx.ops.checks import check_ste
from pt2mx.pt2e.observe.tensor_scales import check_tensor_scale
from pt2mx.pt2e.observe.torchao_pt2e import QuantizationSpec
from pt2mx.spec import MXSpec, parse

#: meta key of an operator's node: the config that a setting gave it
CONFIG_KEY = "mx_config"

_TAG = "mx"
#: gradient estimator, scale format, rows and tensor scale of older versions, where a `qscheme` ends before them
_DEFAULTS = ("identity", None, None, "dynamic")


def mx_qspec(
    spec: object, observer: Callable | None = None, ste: str = "identity", tensor_scale: str = "dynamic"
) -> QuantizationSpec:
    """Return an MX spec as torchao's `QuantizationSpec`, to annotate tensors in a `Quantizer` of your own.

    Args:
        spec: an `MXSpec`, or any spelling that `parse` takes. torchao observes a tensor once for all users with equal
            specs, so always write an axis the same way, negative or not.
        observer: constructs the module that observes the tensor: a class such as `MXObserver` (default) or
            `MXFormatObserver`, or `observer.with_args(...)`. `prepare_qat_pt2e` replaces an `MXObserver` by an
            `MXFakeQuantize`, and warns of a subclass.
        ste: the gradient in training, "identity" or "clipped", as `fake_quantize_mx` takes it.
        tensor_scale: "dynamic", "static" or "moving_average", as `MXQuantizationConfig` takes it; for formats with a
            tensor scale. Weights are "dynamic": conversion computes their scale once.

    Returns:
        The spec for `input_qspec_map` and `output_qspec` of torchao's `QuantizationAnnotation`.

    Raises:
        MXError: for a spec that `parse` does not take, for another `ste`, for another `tensor_scale`, and for an
            `observer` that is no class of torchao's observers or fake quantizers.

    Example:
        >>> import torch, pt2mx
        >>> from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer
        >>> class Linears(Quantizer):
        ...     def annotate(self, model):
        ...         for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        ...             weight = {node.args[1]: pt2mx.mx_qspec("mxfp4")}
        ...             node.meta["quantization_annotation"] = QuantizationAnnotation(weight, _annotated=True)
        ...         return model
        ...     def validate(self, model):
        ...         pass
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> model = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, Linears()))
        >>> print(converted.weight_data.shape)
        torch.Size([8, 32])
    """
    from pt2mx.pt2e.observe.observer import MXObserver  # which imports this module

    check_ste(ste)
    check_tensor_scale(tensor_scale)
    if observer is not None and not (callable(observer) and hasattr(observer, "with_args")):
        raise MXError(
            f"observer={str(observer)[:60]!r} constructs no observer: pass a class such as pt2mx.MXObserver, or "
            "pt2mx.MXObserver.with_args(...)"
        )
    return QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=MXObserver if observer is None else observer,
        qscheme=mx_qscheme(parse(spec), ste, tensor_scale),
    )


def mx_qscheme(spec: MXSpec, ste: str = "identity", tensor_scale: str = "dynamic") -> tuple:
    """Return the spec, the gradient estimator and the choice of the tensor scale as a tuple; torchao shares observers
    with equal tuples. The spec is a text: torchao makes dictionaries of dataclasses."""
    spec.check_operators()
    return _TAG, str(spec), spec.axis, ste, tensor_scale if spec.has_tensor_scale else "dynamic"


def spec_of_qscheme(qscheme: tuple) -> MXSpec:
    """Return the MX spec in a `qscheme`.

    Raises:
        MXError: for a `qscheme` of another kind.
    """
    if not isinstance(qscheme, tuple) or qscheme[:1] != (_TAG,):
        raise MXError(
            f"qscheme={str(qscheme)[:60]!r} is no MX spec: annotate with pt2mx.mx_qspec(spec, observer), which writes "
            "it, or pass pt2mx.pt2e.observe.qspec.mx_qscheme(spec)"
        )
    return _parts(qscheme)[0]


def ste_of_qscheme(qscheme: tuple) -> str:
    """Return the gradient estimator in a `qscheme`, "identity" by default."""
    return _parts(qscheme)[1]


def tensor_scale_of_qscheme(qscheme: tuple) -> str:
    """Return the choice of the tensor scale in a `qscheme`, "dynamic" by default."""
    return _parts(qscheme)[2]


@functools.lru_cache(maxsize=1024)
def _parts(qscheme: tuple) -> tuple[MXSpec, str, str]:
    if len(qscheme) == 5:
        text, axis, ste, tensor_scale = qscheme[1:]
        return parse(text, axis=axis), ste, tensor_scale
    # prepared models that an older version pickled hold the fields of the spec
    element, block_size, axis, scale_mode, rounding = qscheme[1:6]
    ste, scales, block_rows, tensor_scale = qscheme[6:] + _DEFAULTS[len(qscheme) - 6 :]
    spec = MXSpec(element, block_size, axis, scale_mode, rounding, 8, 0, scales or "e8m0", block_rows or 1)
    return spec, ste, tensor_scale


def mx_spec(qspec: object) -> MXSpec | None:
    """Return the MX spec of a torchao annotation, None for a spec of another library."""
    qscheme = getattr(qspec, "qscheme", None)
    return spec_of_qscheme(qscheme) if isinstance(qscheme, tuple) and qscheme[:1] == (_TAG,) else None
