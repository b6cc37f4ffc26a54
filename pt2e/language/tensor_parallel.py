"""Tensor parallelism: shard the linear layers of a causal language model of transformers among ranks.

The `tp_plan` of each architecture in transformers says how its layers are sharded. Rows of a weight are outputs: each
rank computes its own. Columns are inputs: an all-reduce adds the results of the ranks. The collectives are functional,
so that export traces them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.node import value_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.pt2e.language.arguments import check_model
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.optimize.targets import quantized_inputs
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: torch's name of the default process group
_GROUP = "0"
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


class Style(NamedTuple):
    """A way to shard a linear layer.

    Args:
        dim: the dimension of the weight to split: its rows (0) or columns (1).
        takes_whole_input: the input is not sharded, so that each rank takes its slice of it.
        gathers_output: the ranks gather the outputs.
    """

    dim: int
    takes_whole_input: bool = False
    gathers_output: bool = False


#: name in transformers' plans -> style
STYLES = {
    "colwise": Style(0),
    "colwise_gather_output": Style(0, gathers_output=True),
    "rowwise": Style(1),
    "rowwise_split_input": Style(1, takes_whole_input=True),
}
#: names in the plans for modules that every rank holds whole: norms, and embeddings
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Return the shard of a causal language model for this rank of the default process group.

    Every rank holds embeddings and norms whole. It also holds a head whole that shares its weight with the embedding,
    or whose rows the number of ranks does not divide. Every rank computes all logits.

    Args:
        model: the whole model of transformers. It is not changed; the result shares its unsharded parameters.

    Returns:
        A model with the same names, for `quantize_language_model`.

    Raises:
        MXError: without a process group; where transformers has no plan for the architecture, or one that shards other
            modules than linear layers, such as experts; where the number of ranks does not divide heads or weights.
    """
    check_model(model)
    if not dist.is_initialized():
        raise MXError("there are no ranks: run under torchrun, after torch.distributed.init_process_group()")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return model
    styles = dict(_styles(model, ranks))
    _check_heads(model, ranks)
    parameters = {id(parameter): parameter for parameter in model.parameters()}  # deepcopy keeps the unsharded ones
    for name, style in styles.items():
        linear = cast(nn.Linear, model.get_submodule(name))
        _check_size(name, linear, style, ranks)
        parameters |= {id(whole): _slice(whole, style, rank, ranks) for whole in linear.parameters()}
    sharded = copy.deepcopy(model, parameters)
    for name, style in styles.items():
        _connect(cast(nn.Linear, sharded.get_submodule(name)), style, rank, ranks)
    try:
        layers_of(sharded)
    except RuntimeError as error:  # the model's code needs all heads
        raise MXError(f"{type(model).__name__} cannot compute some of its heads: {error}; quantize it whole") from None
    return sharded


def _styles(model: PreTrainedModel, ranks: int) -> Iterator[tuple[str, Style]]:
    """Yield the layers to shard, by name."""
    plan, kind = getattr(model, "tp_plan", None) or {}, type(model).__name__
    if not any(STYLES[style].dim for style in plan.values() if style in STYLES):
        raise MXError(f"transformers has no plan to divide the layers of {kind} among ranks: quantize it whole")
    parts: dict[str, Any] = {**dict(model.named_modules()), **dict(model.named_parameters())}
    embedding = model.get_input_embeddings().weight
    for name, part in parts.items():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style is None or style in _WHOLE:
            continue
        if style not in STYLES or not isinstance(part, nn.Linear):
            raise MXError(
                f"transformers divides {name} of {kind}, a {type(part).__name__}, by {style!r}: supported are linear "
                f"layers, by {', '.join(STYLES)}; quantize the model whole"
            )
        optional = STYLES[style].gathers_output  # the next modules see the same where it is whole
        if not (optional and (part.weight is embedding or part.out_features % ranks)):
            yield name, STYLES[style]


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config()
    if "colwise" not in model.tp_plan.values():
        return  # attention is not sharded
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or ranks
        if heads % ranks:
            raise MXError(f"{name}={heads} cannot be divided among {ranks} ranks: take a number that divides {heads}")


def _check_size(name: str, linear: nn.Linear, style: Style, ranks: int) -> None:
    size = linear.weight.shape[style.dim]
    if size % ranks:
        kind = ("outputs", "inputs")[style.dim]
        raise MXError(
            f"the {size} {kind} of {name} cannot be divided among {ranks} ranks: take a number that divides it"
        )


def _slice(parameter: nn.Parameter, style: Style, rank: int, ranks: int) -> nn.Parameter:
    """Return a rank's slice of a weight or a bias. Only the first rank adds a bias before an all-reduce."""
    if style.dim < parameter.dim():
        part = parameter.detach().chunk(ranks, style.dim)[rank].clone(memory_format=torch.contiguous_format)
    else:
        part = parameter.detach().clone() if rank == 0 else torch.zeros_like(parameter)
    return nn.Parameter(part, parameter.requires_grad)


def _connect(linear: nn.Linear, style: Style, rank: int, ranks: int) -> None:
    """Register the collectives of a layer with sharded parameters."""
    linear.out_features, linear.in_features = linear.weight.shape
    if style.takes_whole_input:
        linear.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(ranks, -1)[rank],))
    if style.gathers_output:
        linear.register_forward_hook(partial(_all_gather, ranks))
    if style.dim == 1:
        linear.register_forward_hook(_all_reduce)


def _all_reduce(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(_ALL_REDUCE(output, "sum", _GROUP))


def _all_gather(ranks: int, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    outputs = torch.ops._c10d_functional.all_gather_into_tensor(output.contiguous(), ranks, _GROUP)
    return torch.cat(torch.ops._c10d_functional.wait_tensor(outputs).chunk(ranks), -1)


def is_shard(program: ExportedProgram) -> bool:
    """Return True for a program exported from a shard."""
    return any(node.target is _ALL_REDUCE for node in program.graph.nodes)


def check_blocks(model: GraphModule, quantizer: MXQuantizer) -> None:
    """Raise an `MXError` if the blocks of a shard would differ from the blocks of the whole model.

    Before an all-reduce each rank has some of the columns, which must be whole blocks."""
    reduced = {node.args[0] for node in model.graph.find_nodes(op="call_function", target=_ALL_REDUCE)}
    if not reduced:
        return
    for matmul, operand, _, spec in quantized_inputs(model, quantizer):
        columns = value_of(operand).shape[-1]
        if matmul in reduced and columns % spec.block_size:
            raise MXError(
                f"a rank has {columns} inputs of {module_name(matmul)}, no multiple of its block size, "
                f"{spec.block_size}: take fewer ranks or smaller blocks, or leave it in high precision"
            )
