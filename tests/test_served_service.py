"""psync.served_service: what a process says of itself to the next coordinator."""
