"""A plain decoder of the shape of Llama 3.2 1B, with a static cache: one step of decoding is one call."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, KEY_HEADS, HEAD, INNER, VOCABULARY, CACHED = 2048, 8, 64, 8192, 128256, 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.register_buffer("keys", torch.zeros(1, KEY_HEADS, CACHED, HEAD))
        self.register_buffer("values", torch.zeros(1, KEY_HEADS, CACHED, HEAD))

    def forward(self, x: Tensor, position: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        h = self.before_attention(x)  # (1, 1, WIDTH)
        q, k, v = (f(h).view(1, 1, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))  # (1, heads, 1, HEAD)
        self.keys.index_copy_(2, position, rotated(k, *rotation))
        self.values.index_copy_(2, position, v)
        h = F.scaled_dot_product_attention(
            rotated(q, *rotation), self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.o(h.transpose(1, 2).reshape(1, 1, WIDTH))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """token: (1, 1) int64, position: (1,) int64 -> the next token, (1, 1) int64. The embedding is tied to the head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x = self.embedding(token)  # (1, 1, WIDTH)
        angle = (position.unsqueeze(-1) * self.frequencies).to(x.dtype)  # (1, HEAD / 2)
        mask = torch.arange(CACHED, device=token.device) <= position  # (CACHED)
        for layer in self.layers:
            x = layer(x, position, (angle.cos(), angle.sin()), mask.view(1, 1, 1, CACHED))
        return self.head(self.norm(x)).argmax(-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (1, heads, 1, HEAD) turned by the angle of its position; cos, sin: (1, HEAD / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
