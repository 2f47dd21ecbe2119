"""Replica contexts, and collectives of the replicas of ``strategy.run``.

Knows ``client`` and ``serialization``. ``context`` is what ``get_replica_context`` returns; the
coordinator's side of a gang is ``chief.gangs``. Begin with ``context``.
"""
