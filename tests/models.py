"""Small models that several tests quantize."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from pt2mx import MXSpec
from pt2mx.fx.graph.qdq import insert_quantize_dequantize
from pt2mx.pt2e.models.packaged import load_minilm
from pt2mx.pt2e.models.samples import sentences
from tests.flow import exported

BATCH = ({0: torch.export.Dim("batch")},)
#: the arguments of NormalizedConv
IMAGES = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
#: the argument of Tied
IDS = torch.tensor([[3, 0, 7, 19], [1, 1, 2, 5]])


def module_of(forward: Callable[..., object], **attributes: object) -> nn.Module:
    """Return a module with attributes, whose `forward` is a function of the module and its inputs."""
    module = type("Model", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return a model of layers in their order, each of which it has under its name."""
    return nn.Sequential(OrderedDict(layers))


def tied(model: nn.Module, *layers: str) -> nn.Module:
    """Return a model after its layers of these names were given the weight of the first of them."""
    first, *others = map(model.get_submodule, layers)
    for layer in others:
        layer.weight = first.weight
    return model


class Residual(nn.Sequential):
    """Layers in a row, whose result is added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Double(nn.Module):
    """A model with nothing to quantize."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def quantized_double(
    spec: MXSpec, dtype: torch.dtype = torch.float32, dynamic: bool = False
) -> tuple[torch.fx.GraphModule, torch.fx.Node]:
    """Return the graph of `Double` for (3, 70), with x quantized and dequantized, and the node that dequantizes."""
    shapes = ({0: torch.export.Dim("n"), 1: torch.export.Dim("k", max=4096)},) if dynamic else None
    model = exported(Double(), torch.randn(3, 70, dtype=dtype), dynamic_shapes=shapes)
    (mul,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    x = mul.args[0]
    dequantize = insert_quantize_dequantize(x, spec)
    mul.replace_input_with(x, dequantize)
    model.recompile()
    return model, dequantize


class NormalizedConv(nn.Module):
    """A convolution with a batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)
        with torch.no_grad():
            self.bn.running_mean.normal_()
            self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, 4)
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def exported_conv() -> torch.fx.GraphModule:
    """Return the graph of the convolution in evaluation mode, for any number of images."""
    return exported(NormalizedConv().eval(), *IMAGES, dynamic_shapes=BATCH)


def projected() -> nn.Module:
    """Return a layer whose result is multiplied by itself, in blocks along L: (B, L, 40) -> (B, 24, 24)."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.project(x)
        return y.transpose(1, 2) @ y

    return module_of(forward, project=nn.Linear(40, 24))


class Tied(nn.Module):
    """An embedding tied to the head, projections that share their input, and an untransposed weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 64)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.up = nn.Parameter(torch.randn(64, 64))
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:  # (B, S) -> (B, S, 20)
        x = self.embedding(ids)
        x = torch.nn.functional.gelu(self.query(x)) + self.key(x)
        return self.head(x @ self.up)


class Gated(nn.Module):
    """An embedding table, two layers of one input, and a layer of their elementwise product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 64)
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:  # (B, S) -> (B, S, 8)
        x = self.table(ids)
        return self.last(torch.relu(self.first(x)) * self.second(x))


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x):  # (B, S, width)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.up, self.down = Attention(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(x)
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """A small BERT whose head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(200, 64), nn.Sequential(_Layer(64), _Layer(64))
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


class FeedForward(nn.Module):
    """An encoder's layer without its attention, with dropout."""

    def __init__(self, width: int = 64, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation, self.dropout = activation or nn.GELU(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        normed = self.dropout(self.norm(self.dropout(self.first(x)) + x))
        return self.down(self.activation(self.up(normed))) + normed


class SelfAttention(nn.Module):
    """Attention of 2 heads over 2 sequences of 20 tokens, without a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (2, 20, 64) -> (2, 2, 20, 32)
        heads = [layer(x).view(2, 20, 2, 32).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return nn.functional.scaled_dot_product_attention(*heads)


class Depthwise(nn.Module):
    """Channels that fill no block and do not divide by a group of packed codes."""

    def __init__(self):
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 20, 3, groups=20)
        self.point, self.head = nn.Conv2d(20, 70, 1), nn.Linear(70, 10)

    def forward(self, x):
        return self.head(self.point(self.depth(self.stem(x).relu())).relu().mean((2, 3)))


class Matmuls(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return torch.bmm(self.q_proj(x), self.k_proj(x).transpose(1, 2)) @ x


class TwoLayers(nn.Module):
    """Projections and matmuls of activations, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Matmuls(), Matmuls())
        self.lm_head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, 32) -> (B, S, 8)
        return self.lm_head(self.layers(x))


class Logits(nn.Module):
    """A language model of transformers, whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:  # (B, S) -> (B, S, vocabulary)
        return self.model(input_ids=ids).logits


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 8))


#: name -> (function that makes the model, in evaluation mode; its input; its linear layer)
OF_EACH_KIND = {
    "linear": (lambda: _linear().eval(), torch.randn(4, 64), "0"),
    "convolution": (lambda: _convolution().eval(), torch.randn(2, 3, 8, 8), "4"),
    "gated": (lambda: Gated().eval(), torch.arange(10).view(2, 5), "first"),
}


def exported_encoder(layers: int | None = None) -> SimpleNamespace:
    """Return the pretrained sentence encoder, or its first layers: its `program`, of any batch and length, the dynamic
    `shapes`, four sentences as `args`, and 72 as `inputs`."""
    encoder, tokenize = load_minilm()
    encoder.bert.encoder.layer = encoder.bert.encoder.layer[:layers]
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    shapes = {"input_ids": shape, "attention_mask": shape}
    texts = sentences()
    program = torch.export.export(encoder, tokenize(texts[:2]), dynamic_shapes=shapes)
    return SimpleNamespace(program=program, shapes=shapes, args=tokenize(texts[:4]), inputs=tokenize(texts))
