"""Tests of Keras models on one backend: ``KERAS_BACKEND``, or the first of two that is here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

HERE = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]

if HERE:
    os.environ.setdefault("KERAS_BACKEND", HERE[0])


@pytest.fixture
def floats() -> Iterator[Callable[[str], None]]:
    """Set the dtype in which everything is computed, until the test ends."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()

    def set_to(name: str, policy: Any = None) -> None:
        if keras.config.backend() == "jax":
            import jax

            jax.config.update("jax_enable_x64", name == "float64")
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(policy or name)

    yield set_to
    set_to(*before)
