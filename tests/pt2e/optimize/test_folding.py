import pytest
import torch
from torch import nn

from pt2mx.pt2e.optimize.folding import Folder


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):  # (B, S, 16) -> (B, S, 16)
        q, k, v = (layer(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Decomposed(Attention):
    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], 4, 4).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        y = torch.matmul(torch.softmax(q @ k.mT, -1), v)
        return self.o(y.permute(0, 2, 1, 3).flatten(2))


class Gate(nn.Module):
    """A gate with a hand-written norm."""

    def __init__(self, shared=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.gate, self.up, self.o = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.shared = shared

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight
        z = nn.functional.silu(self.gate(y)) * self.up(y)
        return self.o(z) + (self.up.weight.sum() if self.shared else 0)


def folded(model, *x, layer="o", dynamic=None):
    """Scale the input of a layer by powers of two, with parameters alone, and divide before the layer. Return the graph
    and the names of the parameters."""
    graph = torch.export.export(model.eval(), x, dynamic_shapes=dynamic).module()
    linear = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.linear.default and layer in n.args[1].name)
    source, factor = linear.args[0], torch.exp2(torch.arange(16) % 5 - 2.0)
    names = Folder(graph).fold(source, factor)
    graph.register_buffer("factor", factor)
    with graph.graph.inserting_before(linear):
        divided = graph.graph.call_function(torch.ops.aten.div.Tensor, (source, graph.graph.get_attr("factor")))
    linear.update_arg(0, divided)
    graph.recompile()
    return graph, names


@pytest.mark.parametrize(
    ("make", "layer", "names"),
    [
        (Attention, "o_", ["v.weight", "v.bias"]),
        (Decomposed, "o_", ["v.weight", "v.bias"]),
        (Gate, "o_", ["up.weight"]),
        (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), "1", ["0.weight", "0.bias"]),
        (lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 4)), "1", ["0.weight"]),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)), "3", None),
    ],
)
def test_the_output_stays_to_the_bit(make, layer, names):
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    graph, actual = folded(model, x, layer=layer, dynamic=({0: torch.export.Dim("batch"), 1: torch.export.Dim("s")},))
    assert actual == (names or ["0.weight", "0.bias"])
    torch.testing.assert_close(graph(x), model(x), rtol=1e-6, atol=1e-6)
    assert all(
        torch.equal(before[name], p) for name, p in model.named_parameters()
    )  # the caller's parameters do not change
    assert not torch.equal(graph.get_parameter(actual[0]), before[actual[0]])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.o = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.norm(x)
        z = torch.nn.functional.gelu(y)  # not homogeneous
        return self.o(z) + y


@pytest.mark.parametrize("model", [Residual(), Gate(shared=True), nn.Sequential(nn.Identity(), nn.Linear(16, 4))])
def test_there_is_no_way(model):
    """The path has a nonlinear function, a weight with another user, or an input of the model."""
    x = torch.randn(2, 3, 16)
    _, actual = folded(model, x, layer="o_" if hasattr(model, "o") else "1")
    assert not actual


def test_a_residual_is_a_second_user():
    class Two(Residual):
        def forward(self, x):
            y = self.norm(x)
            return self.o(y.relu()) + y

    _, actual = folded(Two(), torch.randn(2, 3, 16), layer="o_")
    assert not actual


class Twice(nn.Module):
    """Tensors that one operator reads twice (a parameter, a factor, keys that are also values), or tensors of another
    size."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.h, self.o, self.w = kind, nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.rand(16))
        self.one, self.square = nn.Linear(16, 1), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):  # (16, 16)
        h = self.h(x)
        return self.o({
            "norm": lambda: nn.functional.layer_norm(x, (16,), self.w, self.w),
            "matmul": lambda: h.relu() @ h.relu(),
            "same": lambda: h @ h,
            "attention": lambda: nn.functional.scaled_dot_product_attention(x[None], h[None], h[None])[0],
            "gate": lambda: self.one(x).reshape(-1, 1) * h,
            "bias": lambda: torch.addmm(h.permute(1, 0), x, self.square),
            "cast": lambda: nn.functional.layer_norm(x, (16,), self.w).to(torch.int32).to(torch.float32),
        }[self.kind]())  # fmt: skip


@pytest.mark.parametrize("kind", ["norm", "matmul", "same", "attention", "gate", "bias", "cast"])
def test_each_node_on_the_way_is_read_once_and_has_the_dimensions(kind):
    torch.manual_seed(0)
    model, x = Twice(kind), 4 * torch.randn(16, 16)
    graph, actual = folded(model, x, layer="o_")
    if kind in ("norm", "same", "attention", "bias", "cast"):
        assert not actual
    if actual:
        torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)
