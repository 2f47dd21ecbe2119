"""Traces: what tasks did in a stretch of a run, as a file of Chrome's Trace Event format.

A task records nothing until it is asked, and stops when nobody asks any more. ``recorder`` keeps
in a ring what passes over its connections and what its worker does; ``collecting`` asks all tasks
of a coordinator. What they answer is understood where the file is written: ``readings`` decodes it,
``clocks`` finds how far the clocks of tasks are apart, ``lanes`` and ``chrome`` draw it; these four
are pure. ``trace`` is one stretch, from its beginning to its file. Read ``recorder`` first.
"""
