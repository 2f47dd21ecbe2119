"""The global step of a synchronous optimizer, where a program for TensorFlow names none."""

from __future__ import annotations

from psync.api.global_step import global_step_of
from psync.api.variables import Variable
from psync.client.scopes import running_scopes
from psync.errors import ConfigurationError


def known_step(last: Variable | None) -> Variable | None:
    """Return the global step of the last push; else that of the strategy that is running.

    Args:
        last: That of the last push; None: nothing was pushed in this process.
    """
    if last is not None:
        return last
    steps = [global_step_of(scope) for scope in running_scopes()]
    return steps[0] if len(steps) == 1 else None


def step_meant(operation: str, name: str, last: Variable | None) -> Variable:
    """Return the global step that an operation needs.

    Args:
        operation: For the message.
        name: Of the optimizer.
        last: As for ``known_step``.

    Raises:
        ConfigurationError: It is not known.
    """
    step = known_step(last)
    if step is None:
        raise ConfigurationError(
            f"{operation} before apply_gradients of {name} was called in this process, "
            "and there is no other global step",
            hint="call it while a coordinator or session is running, with "
            "psync.get_or_create_global_step(). ps 0 puts the tokens and closes the steps by "
            "itself; to put other numbers of tokens: "
            "`await optimizer.init_tokens(global_step, num_tokens)`",
        )
    return step
