"""The tasks of one run on one host: what ``psync run --hosts`` starts there over ssh.

A ``ProcessGroup`` that is told by lines of JSON on stdin what to start, and says on stdout what
became of it. All that holds for tasks of a local run holds here: one that dies is started again at
its old address, and nothing is left behind. The connection is the life of it:

    end of stdin               the launcher, its machine or the connection has ended in order
    silence for ``silence_s``  the network is cut, or the launcher's machine has no power
    SIGTERM, SIGHUP, SIGINT    somebody ends it here

and each stops all tasks in order. If this process is killed, the lifeline of its tasks ends them.
The secret comes by stdin. Tasks get it by a file without a name, that they inherit: neither their
command line nor their environment has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from psync.errors import ConfigurationError
from psync.launch.gpus import GpuShares
from psync.launch.interfaces import PYTHON
from psync.launch.processes import ProcessGroup
from psync.launch.task_output import also_release_blocked_output, write_stdout
from psync.launch.task_process import Process
from psync.wire.handshake import RELEASE

GREETING = "PSYNC-HOST "
"""Begins the first line that is ours: what a login prints comes before."""

Message = dict[str, Any]


@contextlib.contextmanager
def secret_file(secret: str) -> Iterator[tuple[dict[str, str], int]]:
    """Return a context for (what tasks have in their environment, what file they inherit)."""
    with tempfile.TemporaryFile() as file:  # it has no name, and mode 600
        file.write(secret.encode())
        file.flush()
        yield {"PSYNC_SECRET_FILE": f"/dev/fd/{file.fileno()}"}, file.fileno()


class HostAgent:
    """Starts and ends tasks as it is told.

    Args:
        order: The launcher's first line: ``directory`` and ``script`` of the program, ``environ``
            and ``secret`` of tasks, ``gpus`` for each of ``slots`` workers.
        say: Sends a line.

    Raises:
        ConfigurationError: Something that it names is not here.
    """

    def __init__(self, order: Message, say: Callable[[Message], None]) -> None:
        self._say = say
        self.address = own_address(os.environ)
        self._secret: tuple[dict[str, str], int] = {}, -1
        self._order = order
        self._tasks: dict[int, Process] = {}  # by the launcher's number of each process
        self._watchers: set[asyncio.Task[None]] = set()
        enter(order["directory"], order["script"])
        environ = {**os.environ, **order["environ"]}
        environ.pop("PSYNC_SECRET", None)
        self._gpus = GpuShares(order["gpus"], environ)
        self._gpus.check(order["slots"])
        self._group = ProcessGroup(
            {"ps": 0, "worker": 0},
            environ=environ, host=self.address,
            out=lambda text: say({"out": text}), err=lambda text: say({"err": text}),
        )  # fmt: skip

    async def run(self, told: asyncio.Queue[Message | None]) -> None:
        """Do what is told until None comes, then stop all tasks. Cancellation: kills them."""
        with secret_file(self._order["secret"]) as self._secret:
            async with self._group:
                while (message := await told.get()) is not None:
                    await self._do(message)
                for watcher in list(self._watchers):
                    watcher.cancel()

    async def _do(self, message: Message) -> None:
        match message["do"]:
            case "listen":
                try:
                    address = await self._group.add_task(
                        message["job"], message["index"], port=message["port"]
                    )
                    self._say({"listens": message["number"], "address": address})
                except OSError as exc:
                    self._say({"listens": message["number"], "error": exc.strerror or str(exc)})
            case "abandon":
                self._group.abandon(message["job"], message["index"])
            case "start":
                self._start(message)
            case "signal":
                if (task := self._tasks.get(message["number"])) is not None:
                    task.send_signal(message["signal"])
            case "kill":
                if (task := self._tasks.get(message["number"])) is not None:
                    task.kill()

    def _start(self, message: Message) -> None:
        number, job, index = message["number"], message["job"], message["index"]
        self._group.cluster = message["cluster"]
        environ, fd = self._secret
        try:
            task = self._group.start_task(
                job, index, [sys.executable, *message["command"]],
                env={**message["env"], **self._gpus.environ_of(job, message["slot"]), **environ},
                output=message["output"], pass_fds=(fd,),
            )  # fmt: skip
        except OSError as exc:
            self._say({"err": f"[{job}-{index}] could not be started: {exc}\n"})
            self._say({"ended": number, "code": 127})
            return
        self._tasks[number] = task
        self._say({"started": number, "pid": task.pid})
        watcher = asyncio.get_running_loop().create_task(self._watch(number, task))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, number: int, task: Process) -> None:
        code = await task.wait()
        del self._tasks[number]
        self._say({"ended": number, "code": code})


def own_address(environ: Mapping[str, str]) -> str:
    """Return the address at which the launcher has reached this host: others reach it there, too.

    Args:
        environ: ``SSH_CONNECTION`` is client, its port, server, its port.
    """
    connection = environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2].partition("%")[0]
    return socket.gethostbyname(socket.gethostname())


def enter(directory: str, script: str) -> None:
    """Go where the launcher is.

    Raises:
        ConfigurationError: There is no such directory, or the script is not there.
    """
    hint = "the program lies under the same path on all hosts: share the directory, or copy it"
    try:
        os.chdir(directory)
    except OSError as exc:
        raise ConfigurationError(f"{directory}: {exc.strerror}", hint=hint) from exc
    if script and not os.path.exists(script):
        raise ConfigurationError(f"{os.path.join(directory, script)} does not exist", hint=hint)


def _listen(tell: Callable[[Message | None], None], rest: bytes, silence_s: float) -> None:
    """Read what the launcher says. Runs in a thread, for the loop may wait to write output."""
    while select.select([0], [], [], silence_s)[0] and (data := os.read(0, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            tell(json.loads(line))
    tell(None)
    os.kill(os.getpid(), signal.SIGTERM)  # which interrupts such a write


def _say(message: Message, prefix: str = "") -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        write_stdout(f"{prefix}{json.dumps(message)}\n")


def _first_line() -> tuple[bytes, bytes]:
    data = b""
    while b"\n" not in data and (more := os.read(0, 1 << 16)):
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


async def _serve(order: Message, rest: bytes) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[Message | None] = asyncio.Queue()

    def tell(message: Message | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told.put_nowait, message)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(signum, told.put_nowait, None)
        also_release_blocked_output(signum)
    agent = HostAgent(order, _say)
    _say({"ready": agent.address, "pid": os.getpid()})
    *lines, rest = rest.split(b"\n")
    for line in lines:
        told.put_nowait(json.loads(line))
    threading.Thread(target=_listen, args=(tell, rest, order["silence_s"]), daemon=True).start()
    await agent.run(told)


def main() -> None:
    """Greet, take the order, and serve until the connection ends."""
    _say({"psync": RELEASE, "python": PYTHON}, GREETING)
    line, rest = _first_line()
    if not line:
        return  # the launcher does not want it
    try:
        asyncio.run(_serve(json.loads(line), rest))
    except (ConfigurationError, OSError) as exc:
        _say({"error": str(exc)})


if __name__ == "__main__":
    main()
