"""`BFPQuantizer`, an `MXQuantizer` with affine roles, and the annotations for a subclass's own `annotate`."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.pt2e.observe.qspec import mx_qspec
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2mx.pt2e.pt2bfp.specs import BFPConfig
from pt2mx.pt2e.quantizer.annotate import REASON_KEY
from pt2mx.pt2e.quantizer.config import ROLES, MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, argument_of, operands_of, role_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.spec import MXSpec


class BFPQuantizer(MXQuantizer):
    """An `MXQuantizer` whose configs may quantize some roles affinely, by torchao's own observers and fake quantizers.

    It is pt2-bfp's `BFPQuantizer` and `QConfigMapping`. Set configs on it, or subclass it with your own `annotate`.
    """

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate as `MXQuantizer.annotate` does, and add the affine roles."""
        super().annotate(model)
        for graph in graph_modules(model):
            constants = constant_nodes(graph.graph)
            for node in graph.graph.nodes:
                config = node.meta.get(CONFIG_KEY)
                if isinstance(config, BFPConfig) and config.affine:
                    _annotate_affine(node, config, constants)
        return model


def _annotate_affine(node: Node, config: BFPConfig, constants: set[Node]) -> None:
    """Add the affine roles of an operator to its annotation."""
    specs = dict(config.affine)
    annotation = node.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation(_annotated=True))
    for operand in operands_of(node):
        argument = argument_of(node, operand)
        if argument is not None and (spec := specs.get(role_of(operand, argument, constants))) is not None:
            annotation.input_qspec_map[argument] = spec
    annotation.output_qspec = specs.get("output", annotation.output_qspec)
    node.meta.pop(REASON_KEY, None)  # it says that no operand has an MX spec


def get_input_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """Return the annotation of a computed operand, which an `annotate` of your own puts into a
    `BFPQuantizationAnnotation`; None for high precision. Blocks run along `axis`, by default the format's."""
    return _qspec(config, "activation", axis)


def get_output_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """Return the annotation of a result, as `get_input_act_qspec` returns one."""
    return _qspec(config, "output", axis)


def get_weight_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """Return the annotation of a constant operand, as `get_input_act_qspec` returns one."""
    return _qspec(config, "weight", axis)


def get_bias_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """Return the annotation of a bias, as `get_input_act_qspec` returns one."""
    return _qspec(config, "bias", axis)


def _qspec(config: MXQuantizationConfig | None, role: str, axis: int | None) -> QuantizationSpec | None:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(f"expected an MXQuantizationConfig or None, not {config!r}; its roles are {', '.join(ROLES)}")
    if isinstance(config, BFPConfig) and role in dict(config.affine):
        return dict(config.affine)[role]
    spec: MXSpec | None = None if config is None else getattr(config, role)
    if config is None or spec is None:
        return None
    return mx_qspec(spec if axis is None else spec.replace(axis=axis), config.module_of(role), config.ste)
