"""Updates by the replicas of a gang, merged into one that is applied once.

Each replica brings its own value, and the coordinator does with all of them what each would have
done alone. So a variable changes once, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psync.errors import ReplicaValueError, UnsupportedError, ValueMismatchError
from psync.numerics.replicas import ReduceOp, reducing_values
from psync.numerics.rows import IndexedSlices
from psync.numerics.sums import sum_dtype
from psync.replicas.context import GangMember, in_turns


async def assign(member: GangMember, variable: Any, method: str, value: Any) -> None:
    """Write to a variable what its aggregation makes of the values of all replicas.

    Args:
        member: The replica.
        variable: The handle.
        method: Its method that writes: "assign", "assign_add" or "assign_sub".
        value: This replica's; fits the variable.

    Raises:
        ReplicaValueError: The variable has no aggregation.
        PsyncError: As ``ReplicaContext.merge_call``.

    Cancellation: As ``ReplicaContext.merge_call``.

    Source: ``AutoPolicy`` of TensorFlow's ``distribute/values.py``.
    """
    _check_aggregation(member, variable, method)
    await member.collective(f'{method} to "{variable.name}"', _write, (variable, method, value))


async def _write(strategy: Any, calls: Sequence[tuple[Any, str, Any]]) -> None:
    variable, method, first = calls[0]
    aggregation = variable.aggregation.name
    if aggregation != "ONLY_FIRST_REPLICA":
        values = [value for _, _, value in calls]
        first = await in_turns(reducing_values(ReduceOp[aggregation], values))
    await getattr(variable, method)(first)


async def scatter(
    member: GangMember, variable: Any, method: str, rows: np.ndarray, values: np.ndarray
) -> None:
    """Write to rows of a variable what its aggregation makes of those of all replicas.

    Args:
        member: The replica.
        variable: The handle.
        method: Its method that writes: "scatter_add", say.
        rows: This replica's row numbers.
        values: A row for each.

    Raises:
        ReplicaValueError: The variable has no aggregation.
        UnsupportedError: It has SUM or MEAN, and the method is no arithmetic.
        ValueMismatchError: MEAN of a variable of integers.
        PsyncError: As ``ReplicaContext.merge_call``.

    Cancellation: As ``ReplicaContext.merge_call``.

    Source: ``MirroredVariable`` of TensorFlow's ``distribute/values.py``.
    """
    _check_aggregation(member, variable, method)
    if variable.aggregation.name != "ONLY_FIRST_REPLICA" and method not in (*_ADDITIVE, *_FACTORS):
        raise UnsupportedError(
            f'{method} to "{variable.name}" in one of {member.num_replicas} replicas, with '
            f"aggregation {variable.aggregation.name}: expected ONLY_FIRST_REPLICA",
            hint="scatter_add, scatter_sub, scatter_mul and scatter_div are merged with SUM and "
            "MEAN; or do it in a merge_call",
        )
    if variable.aggregation.name == "MEAN" and "float" not in values.dtype.name:
        raise ValueMismatchError(
            f'{method} to "{variable.name}", with aggregation MEAN: expected floating values, got '
            f"{values.dtype}",
            hint="declare it with a floating dtype",
        )
    what = f'{method} to "{variable.name}"'
    await member.collective(what, _write_rows, (variable, method, rows, values))


_ADDITIVE = ("scatter_add", "scatter_sub")
_FACTORS = ("scatter_mul", "scatter_div")


async def _write_rows(
    strategy: Any, calls: Sequence[tuple[Any, str, np.ndarray, np.ndarray]]
) -> None:
    variable, method, rows, values = calls[0]
    aggregation = variable.aggregation.name
    if aggregation == "SUM" or (aggregation == "MEAN" and method in _FACTORS):
        # Of a row that several replicas have, scatter adds the values, or multiplies them.
        rows = np.concatenate([rows for _, _, rows, _ in calls])
        values = np.concatenate([values for _, _, _, values in calls])
        if aggregation == "MEAN":  # as TensorFlow: each factor is divided by the replicas
            quotients = values.astype(sum_dtype(values.dtype), copy=False) / len(calls)
            values = quotients.astype(values.dtype, copy=False)
    elif aggregation == "MEAN":
        slices = [IndexedSlices(values, rows) for _, _, rows, values in calls]
        mean = await in_turns(reducing_values(ReduceOp.MEAN, slices))
        rows, values = mean.indices, mean.values
    await getattr(variable, method)((rows, values))


def _check_aggregation(member: GangMember, variable: Any, method: str) -> None:
    if variable.aggregation.name == "NONE":
        raise ReplicaValueError(
            f'{method} to "{variable.name}" in one of {member.num_replicas} replicas: the variable '
            "has no aggregation to combine the values",
            hint="declare it with aggregation=psync.VariableAggregation.SUM, MEAN or "
            "ONLY_FIRST_REPLICA, or write it in a merge_call",
        )


async def apply_gradients(
    member: GangMember, optimizer: Any, pairs: Sequence[tuple[Any, Any]], global_step: Any
) -> Any:
    """Push the sum of the gradients of all replicas, once; every replica gets the result.

    Args:
        member: The replica.
        optimizer: The handle.
        pairs: This replica's gradients and the variables, which are the same for all replicas.
        global_step: As of ``Optimizer.apply_gradients``.

    Raises:
        ValueMismatchError: The replicas have gradients for different variables.
        PsyncError: As ``ReplicaContext.merge_call``, and as ``Optimizer.apply_gradients``.

    Cancellation: As ``ReplicaContext.merge_call``.

    Source: ``merge_grads_fn`` of TensorFlow's ``keras/optimizers/utils.py``.
    """
    what = f'apply_gradients of "{optimizer.get_name()}"'
    return await member.collective(what, _push, (optimizer, list(pairs), global_step))


async def _push(strategy: Any, calls: Sequence[tuple[Any, list[tuple[Any, Any]], Any]]) -> Any:
    optimizer, pairs, global_step = calls[0]
    variables = [variable for _, variable in pairs]
    for replica, (_, others, _) in enumerate(calls):
        if [variable for _, variable in others] != variables:
            raise ValueMismatchError(
                f"apply_gradients: replica 0 has gradients for {_names(variables)}, replica "
                f"{replica} for {_names([variable for _, variable in others])}",
                hint="pass zeros where a replica has no gradient",
            )
    sums = []
    for position, variable in enumerate(variables):
        gradients = [pairs[position][0] for _, pairs, _ in calls]
        try:
            sums.append(await in_turns(reducing_values(ReduceOp.SUM, gradients)))
        except ReplicaValueError as exc:
            raise ValueMismatchError(f'gradients for "{variable.name}": {exc.message}') from exc
    return await optimizer.apply_gradients(zip(sums, variables, strict=True), global_step)


def _names(variables: Sequence[Any]) -> str:
    return ", ".join(f'"{variable.name}"' for variable in variables)
