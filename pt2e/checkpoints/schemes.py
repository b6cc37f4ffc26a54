"""Schemes: what a checkpoint says of each of its modules."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pt2mx.pt2e.checkpoints.layouts import Layout
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class Scheme:
    """The quantization of a module.

    Args:
        element: of its weight, in blocks of 32 along the last dimension.
        inputs: the spec of its inputs, quantized in each call; None: they stay in high precision.
    """

    element: str
    inputs: MXSpec | None = None


#: kinds of modules
LINEAR, EMBEDDING, EXPERTS = "Linear", "Embedding", "Experts"


@dataclass(frozen=True)
class Module:
    """A module that has a weight.

    Args:
        kind: "Linear", "Embedding" or "Experts": several weights in one tensor.
        scheme: None: it is in high precision.
    """

    kind: str
    scheme: Scheme | None


#: True of (qualified name, kind) of a module
Matches = Callable[[str, str], bool]
#: in order of precedence: the first that matches a module has its scheme, or None
Rules = list[tuple[Matches, Scheme | None]]


@dataclass(frozen=True)
class Schemes:
    """The words of a checkpoint on its modules.

    Args:
        layout: that of its tensors.
        rules: what it says.
    """

    layout: Layout
    rules: Rules

    def of(self, name: str, kind: str = "Linear") -> Scheme | None:
        """Give the scheme of a module.

        Args:
            name: its qualified name.
            kind: the name of its class, such as "Linear".

        Returns:
            Its scheme; None: it is in high precision.
        """
        return next((scheme for matches, scheme in self.rules if matches(name, kind)), None)


def commonest(modules: Iterable[Module]) -> list[Scheme]:
    """The schemes of linear layers and experts, from the one that most have to the rarest; then those of others."""
    present = [module for module in modules if module.scheme is not None]
    counts = Counter({module.scheme: 0 for module in present})
    counts.update(module.scheme for module in present if module.kind != EMBEDDING)
    return [scheme for scheme, _ in counts.most_common() if scheme is not None]


def unquantized(modules: Mapping[str, Module]) -> list[str]:
    """The names of modules in high precision, but for embeddings, which a config for linear layers is not about."""
    return [name for name, module in modules.items() if module.scheme is None and module.kind != EMBEDDING]


def by_wildcard(pattern: str) -> Matches:
    """True of names that a pattern with `*`, or one that begins with "re:", matches as a whole."""
    compiled = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
    return lambda name, kind: compiled.fullmatch(name) is not None


def always(name: str, kind: str) -> bool:
    """True."""
    return True
