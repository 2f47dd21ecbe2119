"""The workload of a simulated run: the program, and the tables of variables that it changes.

``program`` is what the simulated chief runs; ``tables`` says what a table is: variables that
closures change so that every call leaves a mark, and what must hold of them. The other modules are
its kinds, listed in ``table_kinds``.
"""
