"""The wire format: frames, handshake, and every message between tasks.

Pure: knows errors and specs, does no I/O. ``frames`` has the layout of bytes, ``codec`` turns
messages into msgpack headers, ``handshake`` runs one connection until it is open; ``messages``
has all messages.

To add a message: a class in ``messages``, with the next number (``codec.Message`` refuses one
that is taken); a line of golden bytes in ``tests/wire/test_messages.py``; a handler in the
service's ``handlers()``, which ``sync.ps_services``, ``ps_task``, ``worker_task`` and
``coordinator`` gather. A handler is ``net.connection.Handler(run)``, or ``Handler(run, prepare)``
for a message with a body: ``run`` gets the ``Request``, and answers it once, then or later. What
changes a ps and is no update belongs in ``logged`` of ``ps_services.PsServices.handlers``, or its
backup would not have it; what the ledger does not judge, in ``NOT_JUDGED``. Both are for creation,
updates, synchronous parts, locks, pulls and the gate; other services guard and submit by
themselves. Who sends one to a ps makes a ``Call`` of it, or asks with ``PsLink.call``
(``client.link``).

Which of them may be lost: any, with its connection. Then

    a request to a ps that lives                    the sender's ``client.link`` repeats it; what
                                                    it changes is numbered (``client.ps``)
    one to a ps that has died                       the coordinator's and ps 0's go to its backup,
                                                    or after a rollback to the ps that was started
                                                    again, with all of an update's others; a
                                                    worker's nobody: its session ends, its closure
                                                    runs again and makes the same calls
    CloseStep, after ps 0 has died                  the promoted ps 0 (``sync.step_closer``)
    LogEntries, parts of a snapshot for a backup    ``backups.primary``, until the backup has them
    RunClosures, ClosureResults, all else that      nobody: the session ends, closures run again
    coordinator and worker tell each other
    FinalBelow, EndTakes                            nobody: the next, higher number tells it; after
                                                    a recovery the coordinator tells it again

Begin with ``messages``.
"""
