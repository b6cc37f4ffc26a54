"""`MXFakeQuantize`, the module that `prepare_qat_pt2e` inserts."""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.functional import fake_quantize_mx
from pt2mx.fx.graph.node import FakeQuantize, insert_before, node_arg
from pt2mx.pt2e.observe.observer import MXObserver, observed_value
from pt2mx.pt2e.observe.torchao_pt2e import FakeQuantizeBase
from pt2mx.spec import MXSpec


class MXFakeQuantize(MXObserver, FakeQuantizeBase):
    """Fake-quantize with the straight-through gradient (Bengio et al., 2013); kernel and switches of `MXObserver`.

    A static tensor scale follows the batches in training mode, and stays in evaluation mode. With an `anchor`, the
    values are those of a weight that `slice_program` re-quantizes: quantized to the anchor first.

    Args:
        qscheme: as in `MXObserver`.
        fake_quant, observe: as in `MXObserver`, with the other defaults.
        annotation: further arguments of torchao; ignored.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.observe.qspec import mx_qscheme
        >>> fake_quantize = pt2mx.MXFakeQuantize(mx_qscheme(pt2mx.MXSpec("mxfp4")))
        >>> x = torch.tensor([1.0, 2.0, 3.3, 6.0], requires_grad=True)
        >>> y = fake_quantize(x)
        >>> y.detach()
        tensor([1., 2., 3., 6.])
        >>> y.sum().backward()
        >>> x.grad
        tensor([1., 1., 1., 1.])
    """

    follows_training = True
    #: the format of the weight from which this one is sliced; None: it is not sliced
    anchor: MXSpec | None = None

    def __init__(self, qscheme: tuple, *, fake_quant: bool = True, observe: bool = False, **annotation: object) -> None:
        super().__init__(qscheme, fake_quant=fake_quant, observe=observe)

    @property
    def only_rounds(self) -> bool:
        """True if a call is one of the operator `fake_quantize_mx`: nothing is observed, and nothing drawn."""
        plain = self.spec.has_operators and self.spec.rounding != "stochastic"
        return plain and self.fake_quant_enabled and self.is_done and self.static_scale is None and self.anchor is None

    def forward(self, x: Tensor, amax: Tensor | None = None) -> Tensor:
        return super().forward(self.anchored(x) if self.fake_quant_enabled else x, amax)

    def anchored(self, x: Tensor) -> Tensor:
        """Return the values of a weight in the anchor's format.

        Args:
            x: the weight.

        Returns:
            A tensor of the same shape; x without an anchor.
        """
        return x if self.anchor is None else fake_quantize_mx(x, self.anchor, ste=self.ste)

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace the call of this module by a quantize/dequantize pair, after that of the anchor.

        Args:
            model: the prepared graph, which is changed.
            node: the call of this module in it.
        """
        if self.anchor is not None:
            x = node_arg(node)
            x.meta["val"] = observed_value(node)
            call = FakeQuantize(x, self.anchor, None, "identity")
            node.replace_input_with(x, insert_before(node, ops.fake_quantize_mx, *call.args))
        super().convert(model, node)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.anchor is None else f", sliced from {self.anchor}")
