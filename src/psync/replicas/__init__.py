"""What several replicas do together: contexts, collectives, gangs of ``strategy.run``.

Knows ``client`` and ``serialization``. ``context`` is what ``get_replica_context`` returns,
``gang_runner`` runs one step on all workers and merges where they meet. Begin with ``context``.
"""
