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
        """Annotate as `MXQuantizer.annotate` does, and add the affine roles.

        Args:
            model: the exported graph; the meta of its nodes changes.

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
    node.meta.pop(REASON_KEY, None)  # it says that no operand has an MX spec


_DOCSTRING = """Return the annotation of {tensor} for a config, after `{name}` of torchao's quantizers, which pt2-bfp
    has. An `annotate` of your own puts it into a `BFPQuantizationAnnotation`.

    Args:
        config: the config of the operator, or None.
        axis: the dimension along which blocks run; by default the axis of the config's format.

    Returns:
        The spec as torchao's `QuantizationSpec`; None where {tensor} stays in high precision.

    Raises:
        MXError: for another object than a config.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[8|8]{{64}}(SN)")
        >>> config = pt2bfp.BFPQuantizationConfig(spec, spec, spec, spec)
        >>> pt2bfp.{name}(config, axis=-2).qscheme
        ('mx', 'int8', 64, -2, 'floor', 'even', 'identity')
        >>> pt2bfp.{name}(None) is None
        True
    """


def get_input_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "activation", axis)


def get_output_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "output", axis)


def get_weight_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "weight", axis)


def get_bias_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "bias", axis)


for _function, _tensor in {
    get_input_act_qspec: "a computed operand",
    get_output_act_qspec: "a result",
    get_weight_qspec: "a constant operand",
    get_bias_qspec: "a bias",
}.items():
    _function.__doc__ = _DOCSTRING.format(tensor=_tensor, name=_function.__name__)


def _qspec(config: MXQuantizationConfig | None, role: str, axis: int | None) -> QuantizationSpec | None:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(f"expected an MXQuantizationConfig or None, not {config!r}; its roles are {', '.join(ROLES)}")
    if isinstance(config, BFPConfig) and role in dict(config.affine):
        return dict(config.affine)[role]
    spec: MXSpec | None = None if config is None else getattr(config, role)
    if config is None or spec is None:
        return None
    return mx_qspec(spec if axis is None else spec.replace(axis=axis), config.module_of(role), config.ste)
