"""What ``psync bench`` runs: measurements on clusters of real processes, and in virtual time.

``sync_async`` compares synchronous with asynchronous training; the other modules are its parts.
"""
