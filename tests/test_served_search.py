"""psync.served_search: where a chief that comes back finds the ps tasks."""
