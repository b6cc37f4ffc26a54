"""`mx_quantize` of JAX arrays: the bits of torch's kernels under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pt2mx import MX_FORMATS, MXError, MXSpec, mx_quantize
from pt2mx.arrays import as_torch


def sample(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32).astype(dtype)


def same(got, want):
    """Return whether a JAX array has the bits and the dtype of a NumPy array."""
    assert isinstance(got, jax.Array)
    return got.dtype == want.dtype and got.shape == want.shape and np.asarray(got).tobytes() == want.tobytes()


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_same_bits_as_numpy_with_and_without_jit(name, dtype):
    x = sample(3, 5, 40, dtype=dtype)
    for axis in (-1, 0, 1, None):
        want = mx_quantize(np.asarray(x), name, axis=axis)
        assert same(mx_quantize(x, name, axis=axis), want)
        assert same(jax.jit(lambda x, axis=axis: mx_quantize(x, name, axis=axis))(x), want)


def test_memory_is_shared_outside_jit():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = sample(4, 64, dtype=dtype)
        t = as_torch(x)
        assert t.data_ptr() == x.unsafe_buffer_pointer() and str(t.dtype) == f"torch.{x.dtype}"
        before = np.array(x)
        assert mx_quantize(x).unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
        assert same(x, before)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (33,)])
def test_small_shapes(shape):
    x = sample(*shape)
    want = mx_quantize(np.asarray(x), "mxfp4")
    assert same(mx_quantize(x, "mxfp4"), want) and same(jax.jit(lambda x: mx_quantize(x, "mxfp4"))(x), want)


def test_other_scales_and_modes():
    x = sample(4, 40) * 1e-3
    for spec in (MXSpec("int8", 16, 0, "rceil", "half_away"), MXSpec("fp4_e2m1", 8, scale_exp_bits=3)):
        want = mx_quantize(np.asarray(x), spec)
        assert same(mx_quantize(x, spec), want) and same(jax.jit(lambda x, spec=spec: mx_quantize(x, spec))(x), want)


@pytest.mark.compiled_except("jit")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_vmap_keeps_the_axis(transform):
    x = sample(2, 3, 40, 5)

    def rows(axis):
        return lambda x: mx_quantize(x, "mxfp4", 16, axis=axis)

    for axis in (0, 1, -1, -2, None):
        want = np.stack([np.stack([mx_quantize(np.asarray(b), "mxfp4", 16, axis=axis) for b in a]) for a in x])
        assert same(transform(jax.vmap(jax.vmap(rows(axis))))(x), want)
    moved = transform(jax.vmap(rows(0), in_axes=-1, out_axes=1))(x)
    want = np.stack([mx_quantize(np.asarray(x[..., i]), "mxfp4", 16, axis=0) for i in range(5)], 1)
    assert same(moved, want)


def test_vmap_over_scalars_shares_no_scale():
    x = jnp.asarray([100.0, 0.013])
    want = np.asarray([mx_quantize(np.float32(v), "mxfp4") for v in x], np.float32)
    assert same(jax.vmap(lambda v: mx_quantize(v, "mxfp4"))(x), want)
    assert (want != 0).all()


@pytest.mark.compiled_except("jit")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_derivatives_are_straight_through(transform):
    x, weight = sample(4, 40), sample(40, 3)
    for axis in (-1, 0, None):

        def loss(x, axis=axis):
            return (jnp.square(mx_quantize(x, "mxfp4", axis=axis)) @ weight).sum()

        want = 2 * mx_quantize(np.asarray(x), "mxfp4", axis=axis) * np.asarray(weight).sum(1)
        np.testing.assert_allclose(transform(jax.grad(loss))(x), want, rtol=1e-5)
    value, tangent = transform(lambda x, t: jax.jvp(lambda x: mx_quantize(x, "mxfp4"), (x,), (t,)))(x, 2 * x)
    assert same(tangent, np.asarray(2 * x)) and same(value, mx_quantize(np.asarray(x), "mxfp4"))
    per_row = transform(jax.vmap(jax.grad(lambda row: (mx_quantize(row, "mxfp4") * weight[:, 0]).sum())))(x)
    assert same(per_row, np.tile(np.asarray(weight[:, 0]), (4, 1)))


def test_gradients_have_the_dtype_of_the_input():
    for dtype in (jnp.float16, jnp.bfloat16):
        grad = jax.jit(jax.grad(lambda x: mx_quantize(x, "mxfp8").sum()))(sample(4, 40, dtype=dtype))
        assert grad.dtype == dtype and (grad == 1).all()


def test_a_training_step_compiles():
    x, y = sample(64, 32), sample(64, 1)

    @jax.jit
    def step(weight):
        def loss(weight):
            return jnp.square(mx_quantize(x, "mxfp8") @ mx_quantize(weight, "mxfp4", axis=0) - y).mean()

        value, grad = jax.value_and_grad(loss)(weight)
        return value, weight - 0.1 * grad

    weight, losses = jnp.zeros((32, 1)), []
    for _ in range(20):
        value, weight = step(weight)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]


def test_large_arrays_in_compiled_programs():
    x = sample(2048, 1024)  # a callback that asked JAX for work would wait for itself here

    @jax.jit
    def twice(x):
        return mx_quantize(mx_quantize(x, "mxfp8") * 3, "mxfp4", axis=0)

    want = mx_quantize(mx_quantize(np.asarray(x), "mxfp8") * 3, "mxfp4", axis=0)
    assert all(same(y, want) for y in [twice(x) for _ in range(3)])


def test_scan_and_remat():
    x = sample(4, 40)
    scanned, _ = jax.lax.scan(lambda carry, row: (carry + mx_quantize(row, "mxfp4"), None), jnp.zeros(40), x)
    want = np.zeros(40, np.float32)
    for row in np.asarray(x):
        want += mx_quantize(row, "mxfp4")
    assert same(scanned, want)
    grad = jax.grad(lambda x: jnp.square(jax.checkpoint(lambda x: mx_quantize(x, "mxfp4"))(x)).sum())(x)
    assert same(grad, 2 * mx_quantize(np.asarray(x), "mxfp4"))


def test_equal_calls_are_compiled_once():
    traces = []

    @jax.jit
    def compiled(x, seed):
        traces.append(x)
        return mx_quantize(x, "mxfp4", rounding="stochastic", seed=seed)

    x = sample(4, 40)
    for seed in (1, 2, 1):
        want = mx_quantize(np.asarray(x), "mxfp4", rounding="stochastic", seed=seed)
        assert same(compiled(x, jnp.int32(seed)), want)
        assert same(mx_quantize(x, "mxfp4", rounding="stochastic", seed=jnp.int32(seed)), want)
    assert len(traces) == 1


@pytest.mark.compiled
def test_stochastic_rounding():
    x = sample(4, 40)

    def f(x, seed):
        return mx_quantize(x, "mxfp4", rounding="stochastic", seed=seed)

    want = mx_quantize(np.asarray(x), "mxfp4", rounding="stochastic", seed=3)
    assert same(f(x, 3), want) and same(jax.jit(lambda x: f(x, 3))(x), want)
    assert same(f(x, torch.Generator().manual_seed(5)), np.asarray(f(x, torch.Generator().manual_seed(5))))
    assert not jnp.array_equal(f(x, None), f(x, None))
    assert (jax.grad(lambda x: f(x, None).sum())(x) == 1).all()
    rows = np.stack([np.asarray(f(row, 3)) for row in x])
    assert same(jax.vmap(lambda row: f(row, 3))(x), rows)
    seeds = jnp.arange(4)
    rows = np.stack([np.asarray(f(row, int(seed))) for row, seed in zip(x, seeds, strict=True)])
    assert same(jax.jit(jax.vmap(f))(x, seeds), rows)
    same_row = np.stack([np.asarray(f(x[0], int(seed))) for seed in seeds])
    assert same(jax.vmap(lambda seed: f(x[0], seed))(seeds), same_row)


def test_tracing_draws_no_numbers_of_torch():
    state = torch.get_rng_state()
    jax.jit(lambda x, seed: mx_quantize(x, "mxfp4", rounding="stochastic", seed=seed))(sample(4, 40), jnp.int32(1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 2}, "axis=2 is out of range"),
        ({"format": "mxfp9"}, "unknown MX element format"),
        ({"rounding": "stochastic", "seed": -1}, "seed=-1 "),
        ({"rounding": "stochastic", "seed": 1.5}, "seed=1.5 "),
        ({"rounding": "stochastic", "seed": True}, "seed=True "),
        ({"rounding": "stochastic", "seed": jnp.ones(3)}, "must be an integer scalar"),
    ],
)
def test_bad_arguments_are_found_while_tracing(transform, arguments, message):
    with pytest.raises(MXError, match=message):
        transform(lambda x: mx_quantize(x, **arguments))(sample(2, 4))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
@pytest.mark.parametrize("seed", [None, torch.Generator()])
def test_a_traced_function_must_be_pure(transform, seed):
    with pytest.raises(MXError, match="must be an integer or an integer JAX scalar"):
        transform(lambda x: mx_quantize(x, "mxfp4", rounding="stochastic", seed=seed))(sample(2, 4))


def test_dtypes_and_types_that_are_not_taken():
    with jax.enable_x64(True), pytest.raises(MXError, match=r"dtype float64 .* x.astype\('float32'\)"):
        mx_quantize(jnp.ones(4, jnp.float64))
    with pytest.raises(MXError, match="dtype int32"):
        jax.jit(mx_quantize)(jnp.ones(4, jnp.int32))
    with pytest.raises(MXError, match=r"ShapeDtypeStruct: .* JAX array"):
        mx_quantize(jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(MXError, match="a traced JAX array has no values"):
        jax.jit(as_torch)(sample(4))


@pytest.mark.compiled
def test_jax_is_imported_for_its_arrays_only_and_they_keep_their_sharding(run_python):
    code = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import numpy as np
from pt2mx import mx_quantize
x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
want = mx_quantize(x, "mxfp4")
assert "jax" not in sys.modules
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
mesh = Mesh(np.array(jax.devices()), ("a",))
spread = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("a",), (None, "a"), ())]
for sharding in (SingleDeviceSharding(jax.devices()[1]), *spread):
    y = mx_quantize(jax.device_put(x, sharding), "mxfp4")
    assert y.sharding == sharding and np.array_equal(y, want)
rows = PartitionSpec("a")
local = jax.shard_map(lambda x: mx_quantize(x, "mxfp4"), mesh=mesh, in_specs=rows, out_specs=rows)
assert np.array_equal(jax.jit(local)(x), want)
"""
    run_python(code)
