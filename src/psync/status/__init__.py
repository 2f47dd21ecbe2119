"""The status of a running cluster: counters read when somebody asks, as one value with a JSON form.

Tasks count in any case; nothing here runs unless a status is asked for. ``model`` has the value,
and makes it of two readings of the counters, ``exposition`` writes it for Prometheus: both are
pure. ``sampling`` reads the counters of a coordinator, its workers and ps tasks. ``serving``
answers this user's other processes, which find it and ask it by ``run_files``. ``http`` answers
whoever asks for metrics, also of one ps or worker from its own process, and serves the dashboard.
``dashboard`` is its page, and the log of a run. ``progress`` and ``html_tables`` show single calls
and values. Read ``model`` first.
"""
