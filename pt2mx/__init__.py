"""pt2mx quantizes PyTorch models to the OCP Microscaling (MX) formats in the PT2 export flow."""

from pt2mx import entrypoint as _entrypoint  # noqa: F401 - first: the command `pt2mx` begins before torch is imported

# isort: split
import sys

from pt2mx import deprecated, fx, pt2e
from pt2mx.lazy_import import attach_lazy, stub_names
from pt2mx.register import register_all

_NAMES = stub_names(__file__)  # public name -> the module that defines it
__all__ = sorted(_NAMES)

attach_lazy(sys.modules[__name__], _NAMES)
for _package in (fx, pt2e):
    attach_lazy(_package)
deprecated.install()
register_all()


def __dir__() -> list[str]:
    return __all__
