"""Tensor parallelism: a causal language model of transformers, of whose linear layers each rank holds a part.

transformers says of each architecture how its layers are divided (`tp_plan`). Rows of a weight are outputs: their
products need nothing of other ranks. Columns are inputs: what the ranks find is added up. The collectives are
functional, so that they are in an exported graph.
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
from pt2mx.pt2e.language.cache import layers_of
from pt2mx.pt2e.optimize.targets import quantized_inputs
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: torch's name of the default process group
_GROUP = "0"
_ADD_UP = torch.ops._c10d_functional.all_reduce.default


class Style(NamedTuple):
    """A way to divide a linear layer: its rows (0) or columns (1), and what else its input and output ask for."""

    dim: int
    takes_whole_input: bool = False
    gathers_output: bool = False


#: names of transformers' plans
STYLES = {
    "colwise": Style(0),
    "colwise_gather_output": Style(0, gathers_output=True),
    "rowwise": Style(1),
    "rowwise_split_input": Style(1, takes_whole_input=True),
}
#: names of what every rank holds: norms, and embeddings, which are read a row a token
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal language model that this rank of the default process group computes.

    Embeddings and norms are whole on every rank, and so is a head that shares its weight with the embedding, or whose
    rows the number of ranks does not divide. Logits are whole, and the same on every rank.

    Args:
        model: of transformers, whole. It stays as it is; the result shares what is not divided with it.

    Returns:
        A model whose names are the same, for `quantize_language_model`.

    Raises:
        MXError: without a process group; where there is no plan for the architecture, or one with entries that linear
            layers do not have, as those of experts; and where heads or the extents of a weight cannot be divided.
    """
    check_model(model)
    if not dist.is_initialized():
        raise MXError("there are no ranks: run under torchrun, after torch.distributed.init_process_group()")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return model
    styles = dict(_styles(model, ranks))
    _check_heads(model, ranks)
    parameters = {id(one): one for one in model.parameters()}  # what is not divided is not copied
    for name, style in styles.items():
        linear = cast(nn.Linear, model.get_submodule(name))
        _check_extent(name, linear, style, ranks)
        parameters |= {id(one): _part(one, style, rank, ranks) for one in linear.parameters()}
    found = copy.deepcopy(model, parameters)
    for name, style in styles.items():
        _connect(cast(nn.Linear, found.get_submodule(name)), style, rank, ranks)
    try:
        layers_of(found)
    except RuntimeError as error:  # its code counts on all heads
        raise MXError(f"{type(model).__name__} cannot compute some of its heads: {error}; quantize it whole") from None
    return found


def _styles(model: PreTrainedModel, ranks: int) -> Iterator[tuple[str, Style]]:
    """The layers to divide, by name."""
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
        optional = STYLES[style].gathers_output  # its readers see the same where it is whole
        if not (optional and (part.weight is embedding or part.out_features % ranks)):
            yield name, STYLES[style]


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config()
    if "colwise" not in model.tp_plan.values():
        return  # attention is whole
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or ranks
        if heads % ranks:
            raise MXError(f"{name}={heads} cannot be divided among {ranks} ranks: take a number that divides {heads}")


def _check_extent(name: str, linear: nn.Linear, style: Style, ranks: int) -> None:
    extent = linear.weight.shape[style.dim]
    if extent % ranks:
        kind = ("outputs", "inputs")[style.dim]
        raise MXError(
            f"the {extent} {kind} of {name} cannot be divided among {ranks} ranks: take a number that divides it"
        )


def _part(parameter: nn.Parameter, style: Style, rank: int, ranks: int) -> nn.Parameter:
    """The part of a weight or a bias that a rank holds. A bias of outputs that are added up counts once."""
    if style.dim < parameter.dim():
        part = parameter.detach().chunk(ranks, style.dim)[rank].clone(memory_format=torch.contiguous_format)
    else:
        part = parameter.detach().clone() if rank == 0 else torch.zeros_like(parameter)
    return nn.Parameter(part, parameter.requires_grad)


def _connect(linear: nn.Linear, style: Style, rank: int, ranks: int) -> None:
    """Have a layer, whose parameters are divided, exchange what it needs with the other ranks."""
    linear.out_features, linear.in_features = linear.weight.shape
    if style.takes_whole_input:
        linear.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(ranks, -1)[rank],))
    if style.gathers_output:
        linear.register_forward_hook(partial(_gathered, ranks))
    if style.dim == 1:
        linear.register_forward_hook(_added_up)


def _added_up(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(_ADD_UP(output, "sum", _GROUP))


def _gathered(ranks: int, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    found = torch.ops._c10d_functional.all_gather_into_tensor(output.contiguous(), ranks, _GROUP)
    return torch.cat(torch.ops._c10d_functional.wait_tensor(found).chunk(ranks), -1)


def is_shard(program: ExportedProgram) -> bool:
    """True of what was exported of such a part."""
    return any(node.target is _ADD_UP for node in program.graph.nodes)


def check_blocks(model: GraphModule, quantizer: MXQuantizer) -> None:
    """`MXError` where blocks of an exported model would not be those of the whole one: of what is added up, each rank
    has a part of the columns."""
    added = {node.args[0] for node in model.graph.find_nodes(op="call_function", target=_ADD_UP)}
    if not added:
        return
    for product, operand, _, spec in quantized_inputs(model, quantizer):
        extent = value_of(operand).shape[-1]
        if product in added and extent % spec.block_size:
            raise MXError(
                f"a rank has {extent} inputs of {module_name(product)}, no multiple of its block size, "
                f"{spec.block_size}: take fewer ranks or smaller blocks, or leave it in high precision"
            )
