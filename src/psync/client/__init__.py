"""One task's way to all ps tasks: plans, links, pulls, pushes, synchronous steps, locks.

Knows ``net`` and ``numerics``. A ``Plan`` says which shard lies where, a ``PsLink`` leads to one ps
and repeats what was not answered, ``PsClient`` asks all of them, ``Runtime`` is what variables and
optimizers find in a step. Begin with ``ps_client``.
"""
