"""What one ps holds: shards, slots, gradients, the ledger of updates, locks, snapshots.

Pure: knows ``numerics`` and the partitioners, no messages and no peers. ``store`` has the shards
and everything that changes them; ``ledger`` judges whether an update is new; ``commit_log`` has the
order of entries. What is in a snapshot, and what is not, is a table in ``snapshot_state``; the
sections of a ps's state are listed in ``sync.ps_services``. Begin with ``store``.
"""
