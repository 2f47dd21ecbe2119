"""The wire format: frames, handshake, and every message between tasks.

Pure: knows errors and specs, does no I/O. ``frames`` has the layout of bytes, ``codec`` turns
messages into msgpack headers, ``protocol`` runs one connection from the handshake on; ``messages``
has what every connection begins with, ``*_messages`` what each pair of tasks says to each other.

To add a message: a frozen class in the ``*_messages`` of its pair, with the next number
(``codec.message`` refuses one that is taken); a line of golden bytes in the test of that module; a
handler in the service's ``handlers()``, which ``sync.ps_services``, ``ps_task``, ``worker_task``
and ``coordinator`` gather. What changes a ps and is no update belongs in ``ps_services.LOGGED``, or
its backup would not have it; what the ledger does not judge, in ``NOT_JUDGED``. Both act on the
services of the first loop in ``PsServices.handlers``; others guard and submit by themselves. A new
module has a line in ``catalogue``.

Which of them may be lost: any, with its connection. Then

    a request to a ps, be it a worker's, the        the sender's ``client.ps_link`` repeats it; what
    coordinator's or ps 0's                         it changes is numbered (``client.outgoing``)
    CloseStep, after ps 0 has died                  the promoted ps 0 (``sync.outgoing_steps``)
    LogEntries, parts of a snapshot for a backup    ``backups.sender``, until the backup has them
    RunClosures, ClosureResults                     nobody: the session ends, closures run again
    FinalBelow, ForgetTakes                         nobody: the next, higher number tells it

Begin with ``messages``.
"""
