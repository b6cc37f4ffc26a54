"""TensorFlow tensors, in a separate process. TensorFlow is large and pins common packages, so it is installed for this
test alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
CHECKS = """
import numpy as np
import tensorflow as tf

from pt2mx import MXError, pychop

x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32) * 5
weight = tf.constant(np.arange(70, dtype=np.float32))
gradient_of_weight = np.tile(np.arange(70), (3, 1))


def same(got, want, dtype="float32"):
    assert isinstance(got, tf.Tensor) and got.dtype == dtype and np.array_equal(got, want)


# values and dtypes equal the NumPy results
for dtype in ("float32", "float16", "float64", "bfloat16", "int32", "uint8", "bool"):
    tensor = tf.cast(tf.constant(abs(x)), dtype)
    for format in pychop.MX_FORMATS:
        want = pychop.mx_quantize(tensor.numpy(), format, 16)
        same(pychop.mx_quantize(tensor, format, 16), want, want.dtype.name)
assert pychop.mx_quantize(tf.constant(2.4)).numpy() == 2.5 and pychop.mx_quantize(tf.zeros((0, 4))).shape == (0, 4)

# gradients pass to variables too, also to variables of Keras's layers
layer = tf.keras.layers.Dense(70)
layer(tf.constant(x))
for variable in (tf.Variable(x), tf.Variable(x.astype(np.float64)), layer.weights[0]):
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.cast(pychop.MXQuantizerSTE("mxfp4_e2m1")(variable), "float32") * weight)
    gradient = tape.gradient(y, variable)
    assert np.array_equal(gradient, np.tile(np.arange(70), (variable.shape[0], 1))) and gradient.dtype == variable.dtype


# and inside tf.function, of an unknown number of rows
@tf.function(input_signature=[tf.TensorSpec([None, 70])])
def traced(tensor):
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        y = pychop.mx_quantize(tensor, "mxint8")
        loss = tf.reduce_sum(y * weight)
    assert y.shape[1] == 70
    return y, tape.gradient(loss, tensor)


y, gradient = traced(tf.constant(x))
same(y, pychop.mx_quantize(x, "mxint8"))
assert np.array_equal(gradient, gradient_of_weight)

# the other entries
tensor = pychop.MXTensor(tf.Variable(x), "mxfp4_e2m1")
assert tensor.backend == "tensorflow" and tensor.statistics() == pychop.MXTensor(x, "mxfp4_e2m1").statistics()
same(tensor.dequantize(), pychop.mx_quantize(x, "mxfp4_e2m1"))
rows = pychop.compare_mx_formats(tf.constant(x)).rows
assert [row.format for row in rows] == [row.format for row in pychop.compare_mx_formats(x).rows]

# what has no real numbers in a dense tensor is refused by name
for bad in (tf.constant([1 + 2j]), tf.constant(["a"]), tf.ragged.constant([[1.0], [1.0, 2.0]])):
    try:
        pychop.mx_quantize(bad)
    except MXError as error:
        assert "cannot quantize" in str(error)
    else:
        raise AssertionError(bad)
"""


@pytest.mark.slow
def test_tensors(run_python, tmp_path):
    install = ["install", "--quiet", "-c", str(CONSTRAINTS), "--target", str(tmp_path), "tensorflow-cpu"]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run_python(CHECKS, env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"})
