"""Models with subgraphs: each has one linear layer in a subgraph and one outside."""

import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map

from pt2mx import MXQuantizer, get_default_mx_quantization_config

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp4", "mxfp8"))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.outer(self.apply_inner(x))


class NoGrad(Base):
    def apply_inner(self, x):
        with torch.no_grad():
            return torch.relu(self.inner(x))


class Autocast(Base):
    def apply_inner(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


class Cond(Base):
    def apply_inner(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: self.inner(x * 2) + 1, (x,))


class Nested(Base):
    def apply_inner(self, x):
        def other(x):
            return torch.cond(x[0, 0] > 0, lambda x: self.inner(x), lambda x: x @ self.inner.weight, (x,))

        return torch.cond(x.sum() > 0, other, lambda x: x + 1, (x,))


class WhileLoop(Base):
    def apply_inner(self, x):
        def body(i, x):
            return i + 1, torch.tanh(self.inner(x))

        i = torch.zeros((), dtype=torch.int64)
        return torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, (i, x))[1]


class Scan(Base):
    def apply_inner(self, x):
        def step(carry, y):
            return torch.tanh(self.inner(carry) + y), carry.clone()

        return torch._higher_order_ops.scan(step, x, torch.stack([x, -x]))[0]


class Map(Base):
    def apply_inner(self, x):
        return torch_map(lambda row: self.inner(row), x.unsqueeze(1)).squeeze(1)


class Checkpoint(Base):
    def apply_inner(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class ViewedWeight(Base):
    """The subgraph computes the weight from its operand."""

    def apply_inner(self, x):
        with torch.no_grad():
            return x @ (self.inner.weight.t() * 2).contiguous()


class Branches(nn.Module):
    """A linear layer in each subgraph of a condition."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one, self.two, (x,))


class Repeated(nn.Module):
    """Strict export makes one subgraph of the three blocks; two calls share it, each with the weight of its layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x

    @torch.compiler.nested_compile_region
    def block(self, layer, x):
        return torch.relu(layer(x))


MODELS = [NoGrad, Autocast, Cond, Nested, WhileLoop, Scan, Map, Checkpoint, ViewedWeight]
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
