"""Synchronous steps and staleness bounds: rules on ps 0, staging and application on every ps.

Knows ``ps`` and ``client``. ``steps`` decides which contributions count and when a step is
complete, ``staging`` keeps gradients until it is, ``ps_sync`` applies it on every ps. On ps 0,
``step_closer`` puts what the rule is told into the log, and carries its decisions to all ps tasks.
The rules (see ``PURE`` in tests/helpers/law.py) are pure. ``ps_services`` builds the services of a
ps, those of ``ps`` as well, and lists the sections of its state.

Begin with ``steps``. What becomes of a step when ps 0 dies: the table on top of ``step_closer``.
"""
