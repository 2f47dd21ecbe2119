"""What one ps holds and remembers: shards, slots, gradients, the ledger of updates, snapshots.

Pure: knows ``numerics`` and the partitioners; who sends what is no concern of it. ``store`` is the
whole; ``ledger`` decides whether an update is new; ``commit_log`` orders what a backup gets;
``snapshot`` is the state of a ps at one position. Begin with ``store``.
"""
