"""The placement report of ``strategy.placement()``: the shards and bytes on each ps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psync.cluster import device_name
from psync.specs import VariableSpec
from psync.status.html_tables import table


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """One shard, and where it lies."""

    variable: str  # name of the variable
    shard: int  # number of the shard in the variable, from 0
    shape: tuple[int, ...]  # of the shard
    dtype: str
    nbytes: int  # of the values; slots of optimizers lie beside them, and are not counted
    ps: int  # index of the ps that holds it
    device: str  # the same in TensorFlow's long form


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Where the variables of a strategy lie. ``str()`` is a table, as is what a notebook shows."""

    rows: tuple[PlacedShard, ...]  # in the order of declaration
    totals: tuple[int, ...]  # bytes on each ps

    def __str__(self) -> str:
        cells = [("variable", "shard", "shape", "dtype", "bytes", "ps")]
        cells += [
            (row.variable, str(row.shard), str(row.shape), row.dtype, f"{row.nbytes:,}",
             str(row.ps))
            for row in self.rows
        ]  # fmt: skip
        cells += [
            ("all of it", "", "", "", f"{nbytes:,}", str(ps))
            for ps, nbytes in enumerate(self.totals)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = (False, True, False, False, True, True)  # numbers
        return "\n".join(
            "  ".join(
                cell.rjust(width) if aligned else cell.ljust(width)
                for cell, width, aligned in zip(line, widths, right, strict=True)
            )
            for line in cells
        )

    def _repr_html_(self) -> str:
        rows = [
            (row.variable, row.shard, row.shape, row.dtype, row.nbytes, f"ps {row.ps}")
            for row in self.rows
        ]
        totals = [
            ("all of it", "", "", "", nbytes, f"ps {ps}") for ps, nbytes in enumerate(self.totals)
        ]
        title = f"Placement: {sum(self.totals):,} bytes on {len(self.totals)} ps"
        head = ("variable", "shard", "shape", "dtype", "bytes", "ps")
        return table(title, head, [*totals, *rows])


def report_of(specs: Iterable[VariableSpec], num_ps: int) -> PlacementReport:
    """Return where the shards of these variables lie.

    Args:
        specs: In the order of declaration.
        num_ps: Number of ps tasks.
    """
    rows = tuple(
        PlacedShard(
            spec.name, shard.index, shard.shape, shard.dtype, shard.nbytes, shard.ps,
            device_name("ps", shard.ps),
        )
        for spec in specs
        for shard in spec.shards
    )  # fmt: skip
    totals = [0] * num_ps
    for row in rows:
        totals[row.ps] += row.nbytes
    return PlacementReport(rows, tuple(totals))
