"""Quantize TensorFlow tensors through NumPy, eager and inside `tf.function`. The first TensorFlow tensor
imports this module."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pt2mx.errors import MXError


def through_numpy(x: tf.Tensor, function: Callable[[np.ndarray], np.ndarray], dtype: str) -> tf.Tensor:
    """Return a function of the NumPy array of a tensor or variable (...), as a tensor (...) of the dtype of that name;
    the gradient passes unchanged.

    Raises:
        MXError: for other objects than a dense tensor.
    """
    try:
        tensor = tf.convert_to_tensor(x)
    except (TypeError, ValueError) as error:
        raise MXError(f"cannot quantize a {type(x).__name__}: it is no dense tensor ({error})") from None

    @tf.custom_gradient
    def straight_through(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        y = tf.numpy_function(function, [tensor], tf.as_dtype(dtype), stateful=False)
        return tf.ensure_shape(y, tensor.shape), lambda gradient: gradient

    return straight_through(tensor)
