"""Norms of a synchronous step's mean: the rounds that clipping and Lamb need before it is applied.

Before a step is applied its mean is measured, in passes that change nothing. Each gives two sums
of squares for each shard; added up over a variable, or over all, they give a factor for each
variable.

    pass       sums of squares                                   factor
    gradients  of the mean                                       scale: clipnorm, global_clipnorm
    updates    of the parameter; of its update by the scaled mean  ratio: layerwise rules

A ps that has all of what is added up computes the factors itself. Otherwise ps 0 asks all ps tasks
for their sums (``sync.step_closer``), and sends the factors with ``CloseStep``. Squares are
added up shard by shard in the order of their keys, so the norm is the same, bit for bit, on every
task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psync.numerics.rules import Lamb, UpdateRule, clip_scales, clips_norms

GRADIENTS, UPDATES = "gradients", "updates"

ShardSums = tuple[int, int, float, float]
"""(variable id, shard index, sums of squares): of the mean and 0, or of parameter and update."""

Factors = Mapping[int, float]
"""By variable id."""


class StepNorms:
    """The factors of one step, as far as they are known.

    Args:
        rule: Of the step's optimizer.
        scales: Of each variable; None: not known.
        ratios: Likewise.
    """

    __slots__ = ("_rule", "ratios", "scales")

    def __init__(
        self, rule: UpdateRule, scales: Factors | None = None, ratios: Factors | None = None
    ) -> None:
        self._rule = rule
        self.scales = scales
        self.ratios = ratios

    def passes_together(self, *, spread: bool) -> list[str]:
        """Return the passes that several ps tasks must make together, in order.

        Args:
            spread: Whether a variable may lie on several of them.
        """
        options = self._rule.options
        passes = []
        if options.global_clipnorm is not None or (spread and options.clipnorm is not None):
            passes.append(GRADIENTS)
        if spread and self._rule.takes_norms:
            passes.append(UPDATES)
        return passes

    def passes_alone(self, keys: Sequence[tuple[int, int]]) -> list[str]:
        """Return the passes that a ps makes by itself before it applies the step, in order.

        Args:
            keys: Of its shards that change. Where each is all of its variable that is here, a
                layerwise rule finds the ratio as it is applied.
        """
        passes = []
        if self.scales is None and clips_norms(self._rule.options):
            passes.append(GRADIENTS)
        if self.ratios is None and self._rule.takes_norms:
            if len({variable for variable, _ in keys}) < len(keys):
                passes.append(UPDATES)
        return passes

    def conclude(self, what: str, sums: Iterable[ShardSums]) -> None:
        """Learn the factors from the sums of all shards that count together, in any order."""
        ordered = sorted(sums, key=lambda of_shard: of_shard[:2])
        if what == GRADIENTS:
            squares = ((variable, of_mean) for variable, _, of_mean, _ in ordered)
            self.scales = clip_scales(squares, self._rule.options)
            return
        by_variable: dict[int, list[tuple[float, float]]] = {}
        for variable, _, of_parameter, of_update in ordered:
            by_variable.setdefault(variable, []).append((of_parameter, of_update))
        self.ratios = {
            variable: Lamb.trust_ratio(pieces) for variable, pieces in by_variable.items()
        }

    def known_for(self, keys: Iterable[tuple[int, int]]) -> bool:
        """Return whether each shard has its factors, of those that are known at all."""
        known = [factors for factors in (self.scales, self.ratios) if factors is not None]
        return not known or all(variable in factors for variable, _ in keys for factors in known)
