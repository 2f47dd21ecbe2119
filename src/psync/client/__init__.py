"""The client of the ps tasks: links, pulls, pushes, synchronous steps, locks.

Knows ``net``, ``numerics`` and ``store``. A ``Plan`` maps a set of variables to requests, a
``PsLink`` leads to one ps and sends unanswered requests again, ``Outgoing`` delivers what changes
ps tasks at most once, ``PsClient`` talks to all of them, ``Runtime`` is the interface that
variables and optimizers use in a step. Begin with ``ps``.
"""
