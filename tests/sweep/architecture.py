"""One architecture of the sweep."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt2mx.extras import without_log_warnings
from pt2mx.pt2e.models.float_models import Batch

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Architecture:
    """`construct()` returns a module and the arguments of one call of it, from torch's default generator."""

    name: str
    kind: str
    construct: Callable[[], tuple[nn.Module, Batch]]
    seed: int = 0

    def build(self) -> tuple[nn.Module, Batch]:
        """The module in eval mode, which returns a tuple of tensors, and its arguments; always the same."""
        torch.manual_seed(self.seed)
        with without_log_warnings(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries about their own configurations
            module, batch = self.construct()
        for child in module.modules():
            if isinstance(child, _BATCH_NORMS) and child.running_mean is not None:
                child.running_mean.normal_(0, 0.1)
                child.running_var.uniform_(0.5, 1.5)
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():  # zero until it is trained: it would hide what comes before it
                    parameter.normal_(0, 0.1)
        module.register_forward_hook(lambda module, inputs, output: tensors(output))
        return module.eval(), batch


def tensors(output: object) -> tuple[Tensor, ...]:
    """The tensors in what a model returns; what else it holds (a cache, None) is no output of a graph."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
