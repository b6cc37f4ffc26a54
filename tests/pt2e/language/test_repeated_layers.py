from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree

from pt2mx import LanguageModel
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.repeated_layers import LayerNumber, repeated_layers, traced_layers


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(8, 8), number

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x).relu() * mask


class Numbered(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x) * self.layer_idx


class Far(Layer):
    """It differs from the layers before it in long texts alone."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        columns = torch.arange(x.shape[1])
        near = columns[:, None] - columns < (20 if self.layer_idx < 4 else 40)
        return x + near.float() @ self.linear(x)


class Listed(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x) * [1, 1, 1, 1, 2, 2, 2][self.layer_idx]


class Inner(Layer):
    """A module within the layer has the number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.inner = Far(number)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, mask)


class Printed(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x) * (2 if f"layer {self.layer_idx}" in ("layer 4", "layer 5") else 1)


class Scaled(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 0.5 if number < 4 else 2.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale


class Buffered(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("gain", torch.full((1, 1), 1.0 + number))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).view(x.shape[0], x.shape[1], 8) * self.gain + x


class Pair(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return x + self.linear(x), None


class Sliced(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        gain = 1.0 if x.is_contiguous() else 1.5
        return nn.functional.pad(self.linear(x) * gain, (0, 1))[..., :8]


class WithGlobalMask(Layer):
    """Its second result is a tensor that is none of its arguments."""

    mask: Tensor

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.is_first = number == 0

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.is_first:
            WithGlobalMask.mask = mask
        return x + self.linear(x), WithGlobalMask.mask


class Net(nn.Module):
    def __init__(self, layer: Callable[[int], Layer], count: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        for layer in self.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        return x


def exported(model: nn.Module) -> tuple[ExportedProgram, ExportedProgram, list[str]]:
    """Return a traced program, one with copied layers, and their names."""
    x, shapes = torch.randn(2, 3, 8), ({0: Dim("batch"), 1: Dim("length")},)
    traced = torch.export.export(model, (x,), dynamic_shapes=shapes)
    with repeated_layers(model, "") as copied:
        return traced, torch.export.export(model, (x,), dynamic_shapes=shapes), copied


def described(program: ExportedProgram) -> list[tuple[object, ...]]:
    """Return the nodes of a program with their arguments, shapes and modules; a node is its number."""
    numbers: dict[Node, str] = {}

    def name(node: Node) -> str:
        return numbers[node]

    nodes = []
    for node in program.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        value = node.meta.get("val")
        modules = node.meta.get("nn_module_stack")
        arguments = map_arg(node.args, name), map_arg(node.kwargs, name)
        nodes.append((node.target, *arguments, str(getattr(value, "shape", value)), modules))
    return nodes


@pytest.mark.compiled_except("Layer", "Buffered")
@pytest.mark.parametrize("layer", [Layer, Buffered, Pair, Sliced, WithGlobalMask])
def test_a_program_with_copied_layers_is_the_traced_one(layer: type[Layer]) -> None:
    traced, copied, names = exported(model := Net(layer).eval())
    assert names == [f"layers.{number}" for number in range(7 - len(names), 7)]
    assert len(names) >= 4
    assert described(copied) == described(traced)
    assert copied.graph_signature == traced.graph_signature
    x = torch.randn(5, 4, 8)
    assert torch.equal(copied.module()(x), model(x))
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_layers_that_differ_are_traced() -> None:
    traced, copied, names = exported(Net(Scaled).eval())
    assert set(names) <= {"layers.2", "layers.3", "layers.6"}  # Scaled changes at layer 4
    assert described(copied) == described(traced)


@pytest.mark.compiled_except("array")
@pytest.mark.parametrize(
    "attribute",
    [
        lambda number: np.full(2, number),
        lambda number: [torch.tensor(float(number))],
        lambda number: {"gain": torch.full((2,), float(number))},
        lambda number: partial(torch.add, torch.ones(2)),
        lambda number: [2 if number % 2 else 2.0],
    ],
    ids=["array", "list", "dict", "partial", "int or float"],
)
def test_layers_with_attributes_of_no_plain_equality_are_traced(attribute: Callable[[int], object]) -> None:
    def layer(number: int) -> Layer:
        result = Layer(number)
        result.attribute = attribute(number)  # type: ignore[assignment]
        return result

    traced, copied, names = exported(Net(layer, 4).eval())
    assert names == []
    assert described(copied) == described(traced)


class Cache:
    """The tensors of all layers, registered with pytree as transformers' exporters register caches."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


pytree.register_pytree_node(Cache, lambda cache: (cache.tensors, None), lambda tensors, _: Cache(list(tensors)))


class Cached(Layer):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        return x + self.linear(x) * cache.tensors[LayerNumber.plain(self.layer_idx)]


class CachedNet(Net):
    cache: Cache | None = None

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:  # type: ignore[override]
        self.cache = Cache(tensors)
        for layer in self.layers:
            x = layer(x, self.cache)
        return x


def test_layers_with_a_cache_of_all_layers_are_copied() -> None:
    model = CachedNet(Cached).eval()
    inputs = torch.randn(2, 8), [torch.randn(8) for _ in range(7)]
    traced = torch.export.export(model, inputs)
    with repeated_layers(model, "", lambda number: [model.cache.tensors[number]] if model.cache else []) as copied:
        program = torch.export.export(model, inputs)
    assert len(copied) == 5
    assert described(program) == described(traced)
    assert torch.equal(program.module()(*inputs), model(*inputs))


@pytest.mark.compiled_except("Numbered")
@pytest.mark.parametrize("layer", [Numbered, Far, Listed, Inner, Printed])
def test_layers_that_read_their_number_are_traced(layer: type[Layer]) -> None:
    traced, copied, names = exported(model := Net(layer).eval())
    assert names == []
    assert described(copied) == described(traced)
    x = torch.randn(2, 40, 8)
    assert torch.equal(copied.module()(x), model(x))
    assert [one.layer_idx for one in model.layers] == [*range(7)] and type(model.layers[0].layer_idx) is int


@pytest.mark.parametrize(
    "use",
    [
        lambda n: 3 < n,
        lambda n: n == 3,
        lambda n: n in {3},
        lambda n: {3: 1}[n],
        lambda n: [0, 1, 2, 3][n],
        lambda n: range(n),
        lambda n: n % 2,
        lambda n: 2 - n,
        lambda n: bool(n),
        lambda n: f"{n:02d}",
        lambda n: torch.ones(2) * n,
        lambda n: n * torch.ones(2),
        lambda n: torch.ones(4)[n],
        lambda n: divmod(int(n), 2),
    ],
)
def test_uses_of_a_number_are_remembered(use: Callable[[Any], Any]) -> None:
    number = LayerNumber(3)
    assert not number.is_read and LayerNumber.plain(number) == 3 and not number.is_read
    result = use(number)
    assert number.is_read
    assert (
        torch.equal(torch.as_tensor(result), torch.as_tensor(use(3))) if torch.is_tensor(result) else result == use(3)
    )


def test_few_layers_are_traced() -> None:
    assert exported(Net(Layer, 3).eval())[2] == []


def test_the_layers_are_restored_after_an_error() -> None:
    model = Net(Layer).eval()
    with pytest.raises(KeyError), repeated_layers(model, ""):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_module_that_occurs_twice_is_exported() -> None:
    shared = Layer(0)
    traced, copied, names = exported(Net(lambda number: shared).eval())
    assert names == []
    assert described(copied) == described(traced)


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
SIZES |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
KV = {"num_key_value_heads": 1}
#: family -> its further sizes, and the number of its layers that are copied
FAMILIES = {
    "Llama": ({}, 4),
    "Qwen3": ({**KV, "head_dim": 16}, 4),
    "Phi3": ({}, 4),
    "GPTNeoX": ({}, 4),
    "Olmo2": ({}, 4),
    "Mixtral": ({**KV, "num_local_experts": 4}, 4),
    "Gemma2": ({**KV, "head_dim": 16}, 2),
    "Cohere2": (KV, 3),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "Llama"]


@pytest.mark.compiled
@pytest.mark.slow_cases("Llama-False")
@pytest.mark.parametrize("caches", [True, False])  # without the cache, a trace reads sizes of other tensors
@pytest.mark.parametrize("family", ["Llama", *SLOW])
def test_decoders_of_transformers_are_the_traced_ones(
    family: str, caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, count = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    counts: list[int] = []

    @contextmanager
    def counted(*args: Any) -> Iterator[list[str]]:
        with repeated_layers(*args) as names:
            yield names
        counts.append(len(names))

    monkeypatch.setattr(decoder, "repeated_layers", counted)
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=caches):
        copied = decoder.export_decoder(model)
    assert counts == [count]
    monkeypatch.setattr(decoder, "repeated_layers", traced_layers)
    assert described(copied) == described(decoder.export_decoder(model))


@pytest.mark.compiled
@torch.no_grad()
def test_windows_by_the_number_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No field of the configuration tells these windows, which are longer than the texts of the check."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.2)).eval()
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def windowed(self: nn.Module, hidden_states: Tensor, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        first = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        queries = torch.arange(hidden_states.shape[1]) + first
        distance = queries[:, None] - torch.arange(getattr(cache, "slots", first + hidden_states.shape[1]))
        near = (distance < (20 if self.layer_idx < 4 else 30)) & (distance >= 0)
        mask = near[None, None] if attention_mask is None else attention_mask & near
        return forward(self, hidden_states, attention_mask=mask, **kwargs)

    monkeypatch.setattr(attention, "forward", windowed)
    decoded = LanguageModel(decoder.export_decoder(model), model.config)
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(decoded(ids).logits, model(ids, use_cache=False).logits, atol=1e-4)


@pytest.mark.compiled
def test_numbers_that_torch_takes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def scaled(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
        return forward(self, hidden_states * torch.full((1,), self.layer_idx), **kwargs)

    monkeypatch.setattr(attention, "forward", scaled)
    program = decoder.export_decoder(model)
    factors = [node.args[1] for node in program.graph.nodes if node.target is torch.ops.aten.full.default]
    assert [*range(6)] == [factor for factor in factors if type(factor) is int]


@pytest.mark.compiled
def test_a_program_whose_layers_depend_on_their_number_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward
    numbers = {id(layer.mlp): number for number, layer in enumerate(model.model.layers)}

    def late(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x) * (1 if numbers[id(self)] < 4 else 3)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", late)
    program = decoder.export_decoder(model)
    factors = [node.args[1] for node in program.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert factors.count(3) == 2
