"""The status of a running cluster: counters read when somebody asks, as one value with a JSON form.

Tasks count in any case; nothing here runs unless a status is asked for. ``model`` has the value,
``rates`` makes it of two readings of the counters: both are pure. ``sampling`` reads the counters
of a coordinator, its workers and ps tasks, ``serving`` answers who asks from outside, and
``run_files`` says where: in a file of this user's own. Read ``model`` first.
"""
