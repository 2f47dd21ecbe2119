"""The floor: what raw sockets do on this machine, to hold the figures of psync against.

Receivers stand in the place of workers and senders in the place of ps tasks, each a process of
its own, joined by TCP on loopback, or by Unix sockets. In each step a receiver asks all senders at
once for their part of the bytes ("pull"), hands them their part and waits for an answer from each
("push"), or does one after the other. "Together", a push is answered when all receivers have
pushed, as in synchronous training. Bytes go from a buffer that never changes to a buffer that is
used again and again: no framing, no checks, no copies, only uvloop and the kernel. What else moves
tensors between processes over TCP and under this event loop will hardly be faster.

Through shared memory ("memory") only 64 bytes travel through the Unix socket in each direction, and
receivers copy what they get out of memory that the sender shows them, and what they give into
memory of their own that could be shown. Of "views" they copy nothing.

    with Floor(num_senders=2, num_receivers=2) as floor:
        seconds = floor.measure(nbytes=64 << 20, steps=16, pull=True, push=False)

Run as a program it is one of these processes (see ``_main``); ``throughput.py`` starts them.
"""

import asyncio
import contextlib
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from typing import ClassVar

import numpy as np
import uvloop

MAX_BYTES = 64 << 20  # of one step, over all senders
HEAD = struct.Struct("<BQ55x")  # PULL, or the kind of push whose bytes follow; how many bytes
PULL, PUSH, PUSH_TOGETHER = range(3)
DONE = bytes(64)
"""All messages are multiples of 64 bytes: where bytes are copied to addresses that are not
aligned as those they come from, the kernel is half as fast."""


class Floor:
    """The processes, started and stopped together; idle while nothing is measured."""

    def __init__(self, num_senders, num_receivers, family="tcp"):
        self._senders = [_start("send", family, num_receivers) for _ in range(num_senders)]
        places = [_answer(sender) for sender in self._senders]  # ports, or paths, and files
        self._receivers = [_start("receive", family, *places) for _ in range(num_receivers)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self._receivers, *self._senders):
            process.stdin.close()  # they end when nobody talks to them any more
            process.wait()
            process.stdout.close()

    def measure(self, nbytes, steps, *, pull, push, together=False):
        """Return the seconds from the first receiver's start to the last one's end.

        Args:
            nbytes: What each receiver gets and gives in a step, over all senders.
            steps: How often each of them does so, all at the same time.
            pull: Whether they get it.
            push: Whether they give it.
            together: Whether a sender answers pushes when it has one of each receiver.
        """
        kind = (PUSH_TOGETHER if together else PUSH) if push else None
        order = json.dumps([nbytes // len(self._senders), steps, pull, kind])
        for receiver in self._receivers:
            receiver.stdin.write(order + "\n")
            receiver.stdin.flush()
        spans = [_answer(receiver) for receiver in self._receivers]
        return max(end for _, end in spans) - min(start for start, _ in spans)


def _start(role, *arguments):
    command = [sys.executable, __file__, role, *map(json.dumps, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(process):
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the floor has ended: {process.args}")
    return json.loads(line)


class _Sender(asyncio.BufferedProtocol):
    """Serves one receiver: sends what it asks for, takes what it brings."""

    data = memoryview(np.ones(MAX_BYTES, np.uint8))
    is_shared = False
    num_receivers = 0
    pushed_together: ClassVar[
        list[asyncio.Transport]
    ] = []  # transports of receivers that wait for the others

    def __init__(self):
        self._head = memoryview(bytearray(HEAD.size))
        self._body = memoryview(np.ones(MAX_BYTES, np.uint8))
        self._target, self._filled = self._head, 0
        self._kind = PULL

    def connection_made(self, transport):
        self._transport = transport

    def get_buffer(self, sizehint):
        return self._target[self._filled :]

    def buffer_updated(self, nbytes):
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        self._filled = 0
        if self._target is not self._head:
            self._target = self._head
            self._pushed()
            return
        self._kind, size = HEAD.unpack(self._head)
        if self._kind == PULL:
            self._transport.write(DONE if self.is_shared else self.data[:size])
        elif self.is_shared:
            self._pushed()
        else:
            self._target = self._body[:size]

    def _pushed(self):
        if self._kind == PUSH:
            self._transport.write(DONE)
            return
        self.pushed_together.append(self._transport)
        if len(self.pushed_together) == self.num_receivers:
            for transport in self.pushed_together:
                transport.write(DONE)
            self.pushed_together.clear()


class _Receiver(asyncio.BufferedProtocol):
    """One receiver's connection to one sender, whose memory it may see."""

    data = memoryview(np.ones(MAX_BYTES, np.uint8))

    def __init__(self, shown=None, *, copies=True):
        self._buffer = memoryview(np.ones(MAX_BYTES, np.uint8))
        self._expected, self._filled = 1, 0
        self._shown, self._copies = shown, copies
        self._arena = None if shown is None else memoryview(mmap.mmap(-1, MAX_BYTES))

    def connection_made(self, transport):
        self._transport = transport

    def get_buffer(self, sizehint):
        return self._buffer[self._filled : self._expected]

    def buffer_updated(self, nbytes):
        self._filled += nbytes
        if self._filled == self._expected:
            self._filled = 0
            self._done.set_result(None)

    async def pull(self, size):
        if self._shown is None:
            return await self._send([HEAD.pack(PULL, size)], expected=size)
        await self._send([HEAD.pack(PULL, size)], expected=len(DONE))
        if self._copies:
            self._buffer[:size] = self._shown[:size]

    async def push(self, size, kind):
        if self._shown is None:
            return await self._send([HEAD.pack(kind, size), self.data[:size]], expected=len(DONE))
        if self._copies:
            self._arena[:size] = self.data[:size]
        await self._send([HEAD.pack(kind, size)], expected=len(DONE))

    def _send(self, buffers, expected):
        self._expected = expected
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(buffers)
        return self._done


async def _send(family, num_receivers):
    loop = asyncio.get_running_loop()
    _Sender.num_receivers = num_receivers
    with contextlib.ExitStack() as stack:
        if family == "tcp":
            server = await loop.create_server(_Sender, "127.0.0.1", 0)
            place = server.sockets[0].getsockname()[1]
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory()) + "/floor"
            server = await loop.create_unix_server(_Sender, path)
            _Sender.is_shared = family != "unix"
            place = path, _shown_file() if _Sender.is_shared else ""
        print(json.dumps(place), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)  # until it is closed
        server.close()


def _shown_file():
    """Return the path of a file in memory that has all that can be pulled."""
    fd = os.memfd_create("floor")
    os.posix_fallocate(fd, 0, MAX_BYTES)
    _Sender.data = memoryview(mmap.mmap(fd, MAX_BYTES))
    _Sender.data[:] = bytes([1]) * MAX_BYTES
    return f"/proc/{os.getpid()}/fd/{fd}"


async def _connect(family, place):
    loop = asyncio.get_running_loop()
    if isinstance(place, int):
        return (await loop.create_connection(_Receiver, "127.0.0.1", place))[1]
    path, file = place
    shown = None
    if file:
        with open(file, "rb") as opened:
            shown = memoryview(mmap.mmap(opened.fileno(), MAX_BYTES, prot=mmap.PROT_READ))
    made = await loop.create_unix_connection(
        lambda: _Receiver(shown, copies=family == "memory"), path
    )
    return made[1]


async def _receive(family, places):
    lanes = [await _connect(family, place) for place in places]
    while line := sys.stdin.readline():  # nothing else is to be done meanwhile
        size, steps, pull, kind = json.loads(line)
        began = time.perf_counter()
        for _ in range(steps):
            if pull:
                await asyncio.gather(*(lane.pull(size) for lane in lanes))
            if kind is not None:
                await asyncio.gather(*(lane.push(size, kind) for lane in lanes))
        print(json.dumps([began, time.perf_counter()]), flush=True)


def _main(role, *arguments):
    """Be one of the processes.

    ``send FAMILY RECEIVERS``: serve and print the place; ``receive FAMILY PLACE…``: measure, one
    line per order.
    """
    family, *arguments = [json.loads(each) for each in arguments]
    uvloop.run(_send(family, *arguments) if role == "send" else _receive(family, arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
