"""The services of a ps task: updates, pulls, locks, accumulators, snapshots.

The whole state of a ps is described on top of ``sync.ps_services``.

Knows ``store``, ``net`` and ``client``; ``snapshots`` and ``succession`` stand above, beside the ps
task. Each service answers the requests of one kind. All that
changes the ps goes through ``executor``: an entry of one log, judged in its order; ``computes`` has
the work on arrays that follows. ``updates`` admits updates and has them judged by ``store.ledger``;
synchronous ones by ``sync.steps``.

A service with state serves one coordinator and timeline; the next one gets new services, and what
was begun for an earlier one ends where it began: ``sync.ps_services`` builds and ends all of them.
Begin with ``executor``, then ``updates``.
"""
