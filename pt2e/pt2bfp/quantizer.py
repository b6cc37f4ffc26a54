"""`BFPQuantizer`: an `MXQuantizer` that takes affine roles too."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.pt2e.pt2bfp.specs import BFPConfig
from pt2mx.pt2e.quantizer.annotate import REASON_KEY
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, argument_of, operands_of, role_of
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationAnnotation


class BFPQuantizer(MXQuantizer):
    """An `MXQuantizer` whose configs may have roles in affine quantization, by torchao's own observers and fake
    quantizers; pt2-bfp's `BFPQuantizer` and `QConfigMapping`. Set configs on it, or subclass it with an `annotate` of
    one's own.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> uint8 = pt2bfp.BFPQuantizationSpec(torch.uint8, pt2bfp.default_fake_quant)
        >>> config = pt2bfp.BFPQuantizationConfig(uint8, None, pt2bfp.BFPQuantizationSpec(), None)
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> prepared = pt2bfp.prepare_pt2e(exported, pt2bfp.BFPQuantizer().set_global(config))
        >>> _ = prepared(x)
        >>> sorted(type(m).__name__ for m in prepared.children() if hasattr(m, "enable_fake_quant"))
        ['FakeQuantize', 'MXObserver']
    """

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate as `MXQuantizer.annotate` does, and the affine roles.

        Args:
            model: the exported graph, whose nodes' meta is changed.

        Returns:
            The same graph module.
        """
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
    node.meta.pop(REASON_KEY, None)  # no MX spec for the other operands
