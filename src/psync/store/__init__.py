"""The state of one ps: shards, slots, gradients, the ledger of updates, locks, snapshots.

Pure: knows ``numerics`` and the partitioners, no messages and no peers. ``store`` has the shards
and everything that changes them; ``ledger`` judges whether an update is new; ``commit_log`` orders
what a backup gets; ``snapshot`` is the state of a ps at one position. Begin with ``store``.
"""
