"""`mx_quantize` for JAX arrays: torch's kernels under JAX's transformations. The first JAX array imports this
module."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pt2mx.arrays.numpy import check_dtype, fake_quantize_numpy
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.modes import ROUNDINGS
from pt2mx.spec import MXSpec

#: the seed of stochastic rounding, which may be a JAX scalar
Seed = int | torch.Generator | None


def fake_quantize(x: jax.Array, spec: MXSpec, flat: bool, seed: Seed | jax.Array) -> jax.Array:
    """Return `fake_quantize_mx` of a JAX array (...), traced or not; `flat`: blocks run over the flattened array.

    Raises:
        MXError: as `mx_quantize`.
    """
    _check(x)
    if isinstance(seed, jax.Array) and not (seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer)):
        raise MXError(f"a seed of shape {seed.shape} and dtype {seed.dtype} must be an integer scalar")
    # at least one dimension: vmap adds its batch dimension in front, and blocks must never run along it
    lines = x.reshape(-1) if flat or x.ndim == 0 else x
    if isinstance(seed, jax.Array):
        return _straight_through(lines, seed, _Kernel(spec, None)).reshape(x.shape)
    return _straight_through(lines, None, _Kernel(spec, seed)).reshape(x.shape)


def as_torch(x: jax.Array) -> Tensor:
    """Return the values of a JAX array as a torch tensor (...), which shares memory if torch can read it."""
    _check(x)
    if isinstance(x, jax.core.Tracer):
        raise MXError("a traced JAX array has no values yet: call this outside jit, vmap and grad")
    return torch.from_dlpack(x if _shares_memory(x) else np.asarray(x))


def _check(x: object) -> None:
    if not isinstance(x, jax.Array):
        raise MXError(f"cannot quantize a {type(x).__module__}.{type(x).__qualname__}: it is no JAX array")
    check_dtype(str(x.dtype))


@dataclass(frozen=True)
class _Kernel:
    """The quantization of an array. Equal ones compare equal, so that JAX reuses its compiled programs."""

    spec: MXSpec
    seed: Seed

    def eager(self, x: jax.Array, seed: jax.Array | None) -> jax.Array:
        seed = self.seed if seed is None else int(seed)
        if _shares_memory(x):
            y = jax.dlpack.from_dlpack(fake_quantize_mx(torch.from_dlpack(x), self.spec, seed=seed))
        else:
            y = fake_quantize_numpy(np.asarray(x), self.spec, seed)
        return jax.device_put(y, x.sharding)

    def traced(self, x: jax.Array, seed: jax.Array | None) -> jax.Array:
        random = ROUNDINGS[self.spec.rounding].random
        if random and seed is None and not isinstance(self.seed, int):
            raise MXError(
                f"seed={self.seed!r} must be an integer or an integer JAX scalar for stochastic rounding under jit or "
                "vmap: a traced function is pure, and draws the same numbers from the same seed"
            )
        # check the arguments now, on a tensor without values: in the callback JAX would wrap the error
        fake_quantize_mx(torch.empty(x.shape, device="meta"), self.spec, seed=self.seed)
        axis = self.spec.axis
        host = _Kernel(self.spec.replace(axis=axis if axis < 0 else axis - x.ndim), self.seed)
        return jax.pure_callback(
            host,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *((x,) if seed is None else (x, seed)),
            # batch dimensions go in front, and the axis counts from the end. Random numbers depend on positions, so
            # with them each example is a separate call
            vmap_method="sequential" if random else "expand_dims",
        )

    def __call__(self, x: jax.Array, seed: jax.Array | None = None) -> np.ndarray:
        seed = self.seed if seed is None else int(np.asarray(seed))
        return fake_quantize_numpy(np.asarray(x), self.spec, seed)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _straight_through(x: jax.Array, seed: jax.Array | None, kernel: _Kernel) -> jax.Array:
    traced = isinstance(x, jax.core.Tracer) or isinstance(seed, jax.core.Tracer)
    return (kernel.traced if traced else kernel.eager)(x, seed)


@_straight_through.defjvp
def _identity(kernel: _Kernel, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Return tangents unchanged, and therefore gradients."""
    return _straight_through(*primals, kernel), tangents[0]


def _shares_memory(x: jax.Array) -> bool:
    """Return whether torch can read x in place."""
    devices = x.devices()
    platforms = {device.platform for device in devices}
    return len(devices) == 1 and (platforms == {"cpu"} or (platforms == {"gpu"} and torch.cuda.is_available()))
