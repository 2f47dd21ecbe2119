"""The parts of a worker task: sessions, closures and their inputs, dataset iterators.

Knows ``client`` and ``serialization``; the coordinator is the other end of a connection.
``session`` serves one coordinator, ``data_sources`` has datasets, ``iterators`` load batches ahead
in a thread. The task itself, and what the loss of a ps does to it,
is ``worker_task``. Begin with ``session``.
"""
