"""What callers hand to the public operations: arrays made of it, or an error that names it.

An array of JAX or NumPy is taken as it is; its dtype is never converted. Where an operation wants
integers (ids, lengths), Python's and lists of them do as well. Knows no operation.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LONGEST = 60  # characters of a value that a message shows
_INT32 = np.iinfo(np.int32)


def as_array(name: str, value: Any) -> jax.Array:
    """A JAX array of the same dtype.

    Raises:
      TypeError: not an array of JAX or NumPy, or of a dtype that JAX would change.
    """
    if isinstance(value, jax.Array):
        return value
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"`{name}` must be an array of JAX or NumPy. Got {type(value).__name__}: make one with "
            "jnp.asarray."
        )
    try:
        array = jnp.asarray(value)
    except TypeError:  # strings, objects
        array = None
    if array is None or array.dtype != value.dtype:
        raise TypeError(
            f"`{name}` must have a dtype that JAX keeps. Got {value.dtype}: convert it first."
        )
    return array


def as_int32(name: str, value: Any) -> jax.Array:
    """An i32 array: of an i32 array, of an integer or of (nested) lists of integers.

    Raises:
      TypeError: an array of another dtype, or something that holds no integers of 32 bits.
    """
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.dtype != jnp.int32:
            raise TypeError(
                f"`{name}` must be int32. Got {value.dtype}: convert it with .astype('int32')."
            )
        return jnp.asarray(value)
    try:
        array = np.asarray(value if isinstance(value, int | list | tuple) else None)
    except (TypeError, ValueError):  # lists of tracers, lists of different lengths
        array = np.asarray(None)
    if array.size == 0:
        array = array.astype(np.int32)  # NumPy has no other dtype for nothing than float64
    fits = array.dtype.kind in "iu" and bool(np.all((array >= _INT32.min) & (array <= _INT32.max)))
    if not fits:
        raise TypeError(
            f"`{name}` must be an int32 array, or integers of 32 bits in lists of the same length. "
            f"Got {shown(value)}."
        )
    return jnp.asarray(array, jnp.int32)


def check_described(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is an array or describes one."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")):
        raise TypeError(
            f"`{name}` must be an array, or a jax.ShapeDtypeStruct. Got {type(value).__name__}."
        )


def check_flag(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is True or False: "no" is true for Python."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Got {shown(value)}.")


def check_implementation(name: Any, known: Sequence[str]) -> None:
    """Raises `ValueError` unless `name` is None or one of `known`."""
    if name is not None and not (isinstance(name, str) and name in known):
        raise ValueError(
            f"`implementation` must be None or one of {', '.join(known)}. Got {shown(name)}."
        )


def is_integer(value: Any) -> bool:
    """Whether it is an int; a bool is none here."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, int) and value.bit_length() > _LONGEST * 4:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print thousands of digits
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@jax.custom_jvp
def without_gradients(arrays: Any) -> Any:
    """The same arrays (a pytree), whose differentiation raises `NotImplementedError`.

    The identity: nothing of it is left in a compiled program, and a donated array stays the same.
    """
    return arrays


@without_gradients.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "`pallas_kernels` has no gradients: attention over pages is for inference. Train with "
        "dense attention, jax.nn.dot_product_attention; where no gradient is meant, pass "
        "jax.lax.stop_gradient of the arrays."
    )
