"""Accumulators: gradients of several replicas become one, and stale ones are refused.

Layer: L1. Imports: errors, specs, sums.
"""

from __future__ import annotations

from psync.sums import accumulate as accumulate
from psync.sums import begin as begin
from psync.sums import finish as finish
from psync.sums import sum_dtype as sum_dtype
