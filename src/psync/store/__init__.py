"""What one ps holds: shards with their slots, optimizers, the ledger of updates; as data.

Pure: knows ``numerics`` and what messages say, but no peers. ``store`` has the shards and
everything that changes them; ``ledger`` judges whether an update is new; ``commit_log`` has the
order of entries. Who may use a shard is in ``ps.admission``. The whole state of a ps is described
on top of ``sync.ps_services``; what of it is in a snapshot is a table in ``snapshot_state``. Begin
with ``store``.
"""
