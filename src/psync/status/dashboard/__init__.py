"""The web page of a run, and the run's log: a run as it goes on, or one that has ended.

``view`` turns statuses into what the page shows, and is pure; the page draws it and decides
nothing. ``run_log`` writes and reads statuses in a file, ``recorder`` takes one a second,
``shows`` is a run as the page asks for it, ``server`` serves (aiohttp, the extra ``dashboard``),
and ``static`` is the page. Read ``view`` first.
"""
