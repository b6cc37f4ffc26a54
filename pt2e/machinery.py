"""Every import of torchao's PT2E machinery, and of private torch, that the flow uses.

torchao inserts and removes the observers; what it does to operators that it does not know is worked around by the
callers. Its import announces CUDA extensions that a CPU machine lacks; that is kept off the user's screen.
"""

from torch._C._functorch import is_batchedtensor
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule
from torch.fx.node import has_side_effect
from torch.fx.passes.infra.pass_manager import PassManager

from pt2mx.extras import without_log_warnings

with without_log_warnings():
    import torchao
    from torch.ao.quantization.fx import utils as torch_fx_utils
    from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase
    from torchao.quantization.pt2e.convert import _convert_to_reference_decomposed_fx
    from torchao.quantization.pt2e.prepare import prepare as insert_modules
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint
    from torchao.quantization.pt2e.quantizer import (
        DuplicateDQPass,
        PortNodeMetaForQDQ,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_, _fuse_linear_bn_, _get_node_name_to_scope

__all__ = [
    "Q_ANNOTATION_KEY",
    "FakeQuantizeBase",
    "ObserverBase",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "annotate",
    "convert_modules",
    "fold_batch_norms",
    "forget_models",
    "forget_prepared",
    "insert_observers",
    "is_batchedtensor",
    "is_fake",
    "is_prepared",
]

# Export leaves these in a graph that makes an attention mask by vmap. Nothing reads what they return, and torchao's
# convert removes what nothing reads, unless torch.fx knows that it does something.
for _function in ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"):
    has_side_effect(getattr(predispatch, _function))

#: meta key by which torchao recognizes a prepared model
_PREPARED_KEY = "_observed_graph_module_attrs"


def fold_batch_norms(model: GraphModule) -> None:
    """Fold the batch norms of a model in evaluation into the layers before them."""
    _fuse_conv_bn_(model)
    _fuse_linear_bn_(model)


def annotate(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """What torchao's prepare asks of a quantizer."""
    model = quantizer.transform_for_annotation(model)
    quantizer.annotate(model)
    quantizer.validate(model)
    return model


def insert_observers(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Insert the modules that the annotations of a graph ask for."""
    scopes, callback = _get_node_name_to_scope(model), quantizer.prepare_obs_or_fq_callback
    return insert_modules(model, scopes, is_qat=False, obs_or_fq_callback=callback)


def convert_modules(model: GraphModule) -> GraphModule:
    """Replace the modules of a prepared graph by operators."""
    model = _convert_to_reference_decomposed_fx(model)
    if _holds_other_operators(model):
        for quantization_pass in (DuplicateDQPass(), PortNodeMetaForQDQ()):
            model = PassManager([quantization_pass])(model).graph_module
    return model


def _holds_other_operators(model: GraphModule) -> bool:
    return any(_quant_node_constraint(node) for node in model.graph.nodes)


def is_prepared(model: object) -> bool:
    """Whether `model` holds the modules of a prepared one."""
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
