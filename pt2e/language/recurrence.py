"""Recurrent layers of any length: one step for each token, in a `scan`, from the state in the cache.

transformers computes a prompt in chunks of a fixed size or in a Python loop, neither of which `torch.export` can trace
for any length, and single tokens in another way. Its Mamba also begins each prompt at zero. The functions here replace
transformers' own while a program is traced. The steps compute the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2mx.fx.graph.node import args_of, attribute_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors

#: the step of a recurrence: state, a token of each sequence, fixed tensors -> state, output
Step = Callable[..., tuple[Tensor, Tensor]]


def scan(
    step: Step, state: Tensor, sequences: tuple[Tensor, ...], fixed: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Call `step` for each token of (B, S, ...) tensors; return the outputs, (B, S, ...), and the last state."""
    tokens = [sequence.transpose(0, 1) for sequence in sequences]

    def call(state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return step(state, *inputs[: len(tokens) + len(fixed)])

    # torch (2.13) logs a warning where it saves a scan without fixed tensors
    state, outputs = torch.ops.higher_order.scan(call, [state], tokens, fixed or (state.new_empty(0),))
    return outputs.transpose(0, 1), state


def with_single_steps(decoder: GraphModule) -> GraphModule:
    """Return a decoder for single tokens, in which one step takes the place of each scan, and which shares tensors.

    A decoder without scans is returned itself."""
    if not decoder.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        return decoder
    model = copy_sharing_tensors(decoder)
    graph = model.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, states, sequences, fixed = args_of(node)
        step = cast(GraphModule, attribute_of(model, body)).graph
        with graph.inserting_before(node):
            tokens = [graph.call_function(torch.ops.aten.select.int, (one, 0, 0)) for one in sequences]
            operands = dict(zip(step.find_nodes(op="placeholder"), (*states, *tokens, *fixed), strict=True))
            outputs = cast(list[Node], graph.graph_copy(step, operands))
            stacked = [
                graph.call_function(torch.ops.aten.unsqueeze.default, (one, 0)) for one in outputs[len(states) :]
            ]
        for item, value in enumerate((*outputs[: len(states)], *stacked)):
            for user in [user for user in node.users if user.args[1] == item]:
                user.replace_all_uses_with(value)
                graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    model.recompile()
    return model


def pass_batch_sizes(decoder: GraphModule) -> None:
    """Pass the batch size to each scan, which AOTInductor (torch 2.13) needs for the shapes of the outputs."""
    for node in decoder.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, states, sequences, fixed = args_of(node)
        step = cast(GraphModule, attribute_of(decoder, body))
        with step.graph.inserting_after(step.graph.find_nodes(op="placeholder")[-1]):
            step.graph.placeholder("batch")
        step.recompile()
        with decoder.graph.inserting_before(node):
            batch = decoder.graph.call_function(torch.ops.aten.sym_size.int, (states[0], 0))
        node.args = (body, states, sequences, (*fixed, batch))
    decoder.recompile()


def selective_scan(
    cache: Any,
    /,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba's recurrence for (B, channels, S) inputs and step sizes, and B, C of (B, width, S)."""

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.exp(dt[..., None] * a) * state + dt[..., None] * b[:, None] * x[..., None]
        return state, (state * c[:, None]).sum(-1)

    dt = F.softplus(dt + delta_bias[:, None])
    sequences = [one.transpose(1, 2).float() for one in (hidden_states, dt, B, C)]
    outputs, state = scan(step, cache.latest.recurrent_states[0], tuple(sequences), (A,))
    return (outputs.transpose(1, 2) + hidden_states * D[:, None]) * F.silu(z), state


def chunk_scan(
    cache: Any,
    /,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    dt_limit: tuple[float, float],
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of Mamba-2 for (B, S, heads, width) inputs, and B, C of (B, S, groups, state width)."""
    per_group = hidden_states.shape[2] // B.shape[2]

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        b, c = (one.repeat_interleave(per_group, 1)[:, :, None] for one in (b, c))
        state = (dt * a).exp()[..., None, None] * state + (x * dt[..., None])[..., None] * b
        return state, (state * c).sum(-1)

    dt = F.softplus(dt + dt_bias).clamp(*dt_limit).float()
    inputs = hidden_states.float()
    outputs, state = scan(step, initial_states, (inputs, dt, B.float(), C.float()), (A,))
    return outputs + D[:, None] * inputs, state


def gated_delta_rule(
    cache: Any,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for (B, S, heads, width) queries, keys and values.

    From transformers 5.24 on, a head of queries and keys may have several heads of values."""

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        state = decay[..., None, None].exp() * state
        delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
        state = state + k[..., None] * delta[..., None, :]
        return state, (state * q[..., None]).sum(-2)

    groups = value.shape[2] // key.shape[2]
    query, key = (one.repeat_interleave(groups, dim=2) if groups > 1 else one for one in (query, key))
    q, k, v, decay, beta = (one.float() for one in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    outputs, state = scan(step, initial_state, (q * q.shape[-1] ** -0.5, k, v, decay, beta))
    return outputs.to(query.dtype), state


def _mask(cache: Any, /, config: Any, inputs_embeds: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
    """Return the mask with which recurrent layers hide padding, (B, S)."""
    return cache.mask_of_tokens(inputs_embeds.shape[1])


def griffin_block(
    cache: Any, /, block: Any, input_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute a recurrent block of RecurrentGemma, which does not know its number: the blocks run in order.

    Transformers' block lets padding enter the convolution, so that a text depends on its padding. Here padding is zero,
    as before the first token."""
    layers = [layer for layer in cache.layers if "recurrent_states" in layer.stored]
    cache.latest = layers[0 if cache.latest is None else layers.index(cache.latest) + 1]
    x = block.linear_x(input_states) * cache.mask_of_tokens(input_states.shape[1])[..., None]
    x = cache.latest.update_conv_state(x.transpose(1, 2))
    x = F.conv1d(x, block.conv_1d.weight, block.conv_1d.bias, groups=block.lru_width)
    x = block.rg_lru(x.transpose(1, 2), position_ids)
    return block.linear_out(x * block.act_fn(block.linear_y(input_states))), None


def griffin_recurrence(
    cache: Any, /, unit: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the recurrence of RecurrentGemma for (B, S, channels), which begins anew at position 0."""

    def step(state: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        state = gate * state + x
        return state, state.clone()

    gate = (recurrent_gate * ~reset).float()
    outputs, state = scan(step, cache.latest.recurrent_states[0], (hidden_states.float(), gate))
    cache.latest.update_recurrent_state(state)
    return outputs.to(hidden_states.dtype), None


#: function or method in a module of transformers -> what takes its place, with the cache before its arguments
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "create_recurrent_attention_mask": _mask,
    "RecurrentGemmaRecurrentBlock.forward": griffin_block,
    "RecurrentGemmaRglru._rnn_scan": griffin_recurrence,
}
