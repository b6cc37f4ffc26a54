"""The modules of a model that have weights, by kind, and the scheme that a checkpoint states for each."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.weight_formats import BLOCK
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Scheme:
    """The quantization of a module.

    Args:
        form: the name of the format of its weight, as in `weight_formats`.
        inputs: the spec of its inputs, quantized in each call; None: they stay in high precision.
    """

    form: str
    inputs: MXSpec | None = None


#: kinds of modules
LINEAR, EMBEDDING, EXPERTS = "Linear", "Embedding", "Experts"


@dataclass(frozen=True)
class Module:
    """A module that has a weight.

    Args:
        kind: "Linear", "Embedding", or "Experts" for several weights in one tensor.
        scheme: its quantization; None: it is in high precision.
        pre_scaled: True where the checkpoint holds factors of its inputs, as AWQ computes them.
        rotated: the number of values of its inputs that `hadamard` rotates together; 0: it rotates none.
        is_head: True for the module whose outputs are the logits of tokens, which engines build of a class of its own.
    """

    kind: str
    scheme: Scheme | None
    pre_scaled: bool = False
    rotated: int = 0
    is_head: bool = False


#: a predicate of the qualified name and the kind of a module
Matches = Callable[[str, str], bool]
#: in order of precedence: the first match of a module decides its scheme; None: high precision
Rules = list[tuple[Matches, Scheme | None]]


@dataclass(frozen=True)
class Transform:
    """An orthogonal matrix that multiplies inputs or outputs of modules in blocks, as the model runs.

    Args:
        group: the name of its group in the configuration.
        location: "input" or "output".
        targets, ignored: the modules that it changes, and those of them that it leaves as they are.
        size: the values of a block; None: all of a row.
        inverse: True where the transpose multiplies values.
        is_stored: True where the checkpoint holds the matrix; otherwise it is Sylvester's Hadamard matrix.
    """

    group: str
    location: str
    targets: tuple[Matches, ...]
    ignored: tuple[Matches, ...]
    size: int | None
    inverse: bool
    is_stored: bool

    @property
    def name(self) -> str:
        """The name of the module of its tensors within the module that it changes."""
        return f"{self.group}_{self.location}"

    def changes(self, names: Iterable[tuple[str, str]]) -> bool:
        """Return whether it changes a module, by each of its names with the name of a class."""
        is_target, is_ignored = (
            any(matches(*name) for name in names for matches in rules) for rules in (self.targets, self.ignored)
        )
        return is_target and not is_ignored


@dataclass(frozen=True)
class Schemes:
    """The schemes that a checkpoint states for its modules.

    Args:
        layout: the layout of its tensors.
        rules: the rules of its configuration.
        block: the rows and columns of a block, of a layout whose scales decide the format.
        transforms: what multiplies inputs and outputs of modules as the model runs, in the order of the configuration.
    """

    layout: Layout
    rules: Rules
    block: tuple[int, int] = (1, BLOCK)
    transforms: tuple[Transform, ...] = ()

    def of(self, name: str, kind: str = "Linear") -> Scheme | None:
        """Return the scheme of a module by its qualified name and the name of its class; None: it is in high
        precision."""
        return next((scheme for matches, scheme in self.rules if matches(name, kind)), None)


def most_common(modules: Iterable[Module]) -> list[Scheme]:
    """Return the schemes of linear layers and experts, the most common first; then the other schemes."""
    counts: Counter[Scheme] = Counter()
    for module in modules:
        if module.scheme is not None:
            counts[module.scheme] += module.kind != EMBEDDING
    return [scheme for scheme, _ in counts.most_common()]


def unquantized(modules: Mapping[str, Module]) -> list[str]:
    """Return the names of modules in high precision, except embeddings: configs for linear layers do not cover them."""
    return [name for name, module in modules.items() if module.scheme is None and module.kind != EMBEDDING]


def by_name(target: str) -> Matches:
    """Return the predicate of a name, or of names that begin with a match of a regular expression after "re:"."""
    if target.startswith("re:"):
        pattern = re.compile(target[3:])
        return lambda name, kind: pattern.match(name) is not None
    return lambda name, kind: name == target


def by_class(target: str) -> Matches:
    """Return the predicate of modules of a class."""
    return lambda name, kind: kind == target


def by_wildcard(pattern: str) -> Matches:
    """Return the predicate of names that match a pattern with `*`, or a regular expression after "re:", as a whole."""
    compiled = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
    return lambda name, kind: compiled.fullmatch(name) is not None


def not_converted(config: Mapping[str, Any]) -> Matches:
    """Return the predicate of transformers: a pattern matches at the beginning of a name, or a name ends in it."""
    names = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    patterns = [re.compile(name) for name in names]
    return lambda name, kind: any(one.match(name) or name.endswith(one.pattern) for one in patterns)


def always(name: str, kind: str) -> bool:
    """Return True."""
    return True


def weights_of(model: nn.Module) -> dict[str, str]:
    """Return parameter (..., N, K) -> the kind of its module: `LINEAR`, `EMBEDDING`, `EXPERTS`, or its class name."""
    kinds = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not name.endswith("_bias"):
                kinds[f"{path}.{name}" if path else name] = _kind(module, parameter)
    return kinds


def _kind(module: nn.Module, parameter: nn.Parameter) -> str:
    if are_experts(module) and parameter.dim() == 3:
        return EXPERTS
    if type(module) is nn.Linear:  # libraries that load checkpoints know no subclass
        return LINEAR
    return EMBEDDING if isinstance(module, nn.Embedding) else type(module).__name__


def are_experts(module: nn.Module) -> bool:
    """Return True for a module of transformers with the weights of all experts of a layer, (experts, ..., ...) each."""
    return hasattr(module, "is_transposed")


def head_of(model: PreTrainedModel) -> str | None:
    """Return the name of the module that computes the logits of tokens; None for a model without one."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None) if head else None


def with_head(modules: Mapping[str, Module], model: PreTrainedModel) -> dict[str, Module]:
    """Return modules, of which the head of a model is marked, under its name in the model and in the checkpoint."""
    head = head_of(model)
    if head is None:
        return dict(modules)
    marked = {}
    for name, module in modules.items():
        is_head = f".{name}".endswith(f".{head}") or f".{head}".endswith(f".{name}")
        marked[name] = dataclasses.replace(module, is_head=is_head)
    return marked


def is_transposed(model: nn.Module, weight: str) -> bool:
    """Return True for experts whose parameter is (E, K, N), as in gpt-oss."""
    return bool(getattr(model.get_submodule(weight.rpartition(".")[0]), "is_transposed", False))


def tied_names(model: PreTrainedModel) -> dict[str, set[str]]:
    """Return name -> all names of the same parameter, for parameters with several names.

    On the meta device tied parameters are not tied yet: transformers names those that it will tie."""
    groups: dict[object, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].add(name)
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups[other] |= {name, other}
    tied: dict[str, set[str]] = {}
    for names in groups.values():
        if len(names) > 1:
            tied |= dict.fromkeys(names, names)
    return tied
