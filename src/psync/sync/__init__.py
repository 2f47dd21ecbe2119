"""Synchronous steps and staleness bounds: rules on ps 0, staging and application on every ps.

Knows ``ps`` and ``client``. ``steps`` decides which contributions count and when a step is
complete, ``staging`` keeps gradients until it is, ``step_closer`` puts what the rule is told into
the log and carries what it decides to all ps tasks, ``ps_sync`` applies it there.
The rules (see ``PURE`` in tests/helpers/law.py) are pure. ``ps_services`` builds the services of a
ps, those of ``ps`` as well, and lists the sections of its state.

Begin with ``steps``. What becomes of a step when ps 0 dies: the table on top of ``step_closer``.
"""
