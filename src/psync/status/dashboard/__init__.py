"""The web page of a run, and the run's log: a run as it goes on, or one that has ended.

``view`` turns statuses into what the page shows, and is pure; the page draws it and decides
nothing. ``run_log`` takes a status a second of a run that goes on, writes and reads them in a file,
and makes one HTML file of it; ``status.http`` serves the page (aiohttp, the extra ``dashboard``),
and ``static`` is the page. Read ``view`` first.
"""
