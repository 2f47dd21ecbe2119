"""Synchronous steps and staleness bounds: rules on ps 0, staging and application on every ps.

Knows ``ps`` and ``client``. ``steps`` decides which contributions count and when a step is
complete, ``staging`` keeps gradients until it is, ``step_closer`` closes it on all ps tasks. The
rules (see ``PURE`` in tests/helpers/law.py) are pure. Begin with ``steps``.
"""
