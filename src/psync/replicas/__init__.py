"""Replica contexts, collectives, and gangs (``strategy.run`` on all workers).

Knows ``client`` and ``serialization``. ``context`` is what ``get_replica_context`` returns,
``gang_runner`` runs one step on all workers and merges where they meet. Begin with ``context``.
"""
