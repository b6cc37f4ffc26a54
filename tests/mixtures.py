"""A model with experts in grouped matmuls, as transformers exports gpt-oss, and tokens for them."""

import torch
from torch import Tensor, nn

from pt2mx.extras import import_extra

import_extra(
    "transformers.integrations.moe", "hf"
)  # its operator of float32, which torch.export takes in bfloat16 alone

EXPERTS, CHOSEN, WIDTH = 4, 2, 32


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of each expert times its weight."""
    is_half = x.dtype == torch.bfloat16
    operator = torch._grouped_mm if is_half else torch.ops.transformers.grouped_mm_fallback
    return operator(x, weight, offs=ends)


class Mixture(nn.Module):
    """Experts with biases: each token goes through the two that its router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, 64) / 6),
            nn.Parameter(torch.randn(EXPERTS, 64)),
        )
        self.down = nn.Parameter(torch.randn(EXPERTS, 64, WIDTH) / 8)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (T, WIDTH)
        scores, ids = self.router(x).topk(CHOSEN)
        ids, order = ids.flatten().sort(stable=True)
        ends = (ids[:, None] == torch.arange(EXPERTS, device=x.device)).sum(0).cumsum(0).to(torch.int32)
        rows = order // CHOSEN
        h = grouped_mm(x[rows], self.up, ends) + self.up_bias[ids]
        y = grouped_mm(nn.functional.silu(h), self.down, ends) + self.down_bias[ids]
        weights = scores.softmax(-1).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, y * weights)


class Mixtures(nn.Module):
    """Two layers of experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:  # (T, WIDTH) -> (T, 16)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def mixtures(dtype: torch.dtype = torch.float32) -> Mixtures:
    """Return a model whose first layer has a last expert for tokens that begin with 1 alone, not with 0."""
    torch.manual_seed(0)
    model = Mixtures().eval()
    router = model.layers[0].router
    with torch.no_grad():
        router.weight[-1], router.bias[-1] = 0, -1e4
        router.weight[-1, 0] = 2e4
    return model.to(dtype)


def batches(dtype: torch.dtype = torch.float32, count: int = 9, rare: int = 4) -> list[Tensor]:
    """Return batches of tokens that begin with 0, and one, `rare`, in which a third of the tokens begins with 1."""
    tokens = torch.randn(count, 24, WIDTH, generator=torch.Generator().manual_seed(0))
    tokens[..., 0] = 0
    tokens[rare, :8, 0] = 1
    return list(tokens.to(dtype))
