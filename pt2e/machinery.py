"""Every import of torchao's PT2E machinery, and of private torch, that the flow uses.

torchao inserts and removes the observers; what it does to operators that it does not know is worked around by the
callers. Its import announces CUDA extensions that a CPU machine lacks; that is kept off the user's screen.
"""

from pt2mx.extras import without_log_warnings

with without_log_warnings():
    import torchao
    from torch.ao.quantization.fx import utils as torch_fx_utils
    from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

__all__ = [
    "Q_ANNOTATION_KEY",
    "FakeQuantizeBase",
    "ObserverBase",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "convert_pt2e",
    "forget_models",
    "forget_prepared",
    "is_prepared",
    "prepare_pt2e",
    "prepare_qat_pt2e",
]

#: meta key by which torchao recognizes a prepared model
_PREPARED_KEY = "_observed_graph_module_attrs"


def is_prepared(model: object) -> bool:
    """Whether torchao's convert takes `model`."""
    return _PREPARED_KEY in getattr(model, "meta", {})


def forget_prepared(model: object) -> None:
    """Take the mark of a prepared model away; torchao's convert leaves it."""
    model.meta.pop(_PREPARED_KEY, None)


def forget_models() -> None:
    """Clear the caches of torch and torchao that would keep every prepared model alive."""
    for function in (
        torchao.utils._assert_and_get_unique_device,
        torch_fx_utils.assert_and_get_unique_device,
    ):
        function.cache_clear()
