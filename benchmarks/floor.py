"""The floor: what raw sockets do on this machine, to hold the figures of psync against.

Receivers stand in the place of workers and senders in the place of ps tasks, each a process of
its own, joined by TCP on loopback. In each step a receiver asks all senders at once for their
part of the bytes ("pull"), hands them their part and waits for an answer from each ("push"), or
does one after the other. Bytes go from a buffer that never changes to a buffer that is used
again and again: no framing, no checks, no copies, only uvloop and the kernel. What
else moves tensors between processes over TCP and under this event loop will hardly be faster.

    with Floor(num_senders=2, num_receivers=2) as floor:
        seconds = floor.measure(nbytes=64 << 20, steps=16, pull=True, push=False)

Run as a program it is one of these processes (see ``_main``); ``throughput.py`` starts them.
"""

import asyncio
import json
import struct
import subprocess
import sys
import time

import numpy as np
import uvloop

MAX_BYTES = 64 << 20  # of one step, over all senders
HEAD = struct.Struct("<?Q55x")  # whether the bytes that follow are a push; how many bytes
DONE = bytes(64)
"""All messages are multiples of 64 bytes: where bytes are copied to addresses that are not
aligned as those they come from, the kernel is half as fast."""


class Floor:
    """The processes, started and stopped together; idle while nothing is measured."""

    def __init__(self, num_senders, num_receivers):
        self._senders = [_start("send") for _ in range(num_senders)]
        ports = [_answer(sender) for sender in self._senders]
        self._receivers = [_start("receive", *ports) for _ in range(num_receivers)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self._receivers, *self._senders):
            process.stdin.close()  # they end when nobody talks to them any more
            process.wait()
            process.stdout.close()

    def measure(self, nbytes, steps, *, pull, push):
        """Return the seconds from the first receiver's start to the last one's end.

        Args:
            nbytes: What each receiver gets and gives in a step, over all senders.
            steps: How often each of them does so, all at the same time.
            pull: Whether they get it.
            push: Whether they give it.
        """
        order = json.dumps([nbytes // len(self._senders), steps, pull, push])
        for receiver in self._receivers:
            receiver.stdin.write(order + "\n")
            receiver.stdin.flush()
        spans = [_answer(receiver) for receiver in self._receivers]
        return max(end for _, end in spans) - min(start for start, _ in spans)


def _start(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(process):
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the floor has ended: {process.args}")
    return json.loads(line)


class _Sender(asyncio.BufferedProtocol):
    """Serves one receiver: sends what it asks for, takes what it brings."""

    data = memoryview(np.ones(MAX_BYTES, np.uint8))

    def __init__(self):
        self._head = memoryview(bytearray(HEAD.size))
        self._body = memoryview(np.ones(MAX_BYTES, np.uint8))
        self._target, self._filled = self._head, 0

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
            self._transport.write(DONE)
            return
        is_push, size = HEAD.unpack(self._head)
        if is_push:
            self._target = self._body[:size]
        else:
            self._transport.write(self.data[:size])


class _Receiver(asyncio.BufferedProtocol):
    """One receiver's connection to one sender."""

    data = memoryview(np.ones(MAX_BYTES, np.uint8))

    def __init__(self):
        self._buffer = memoryview(np.ones(MAX_BYTES, np.uint8))
        self._expected, self._filled = 1, 0

    def connection_made(self, transport):
        self._transport = transport

    def get_buffer(self, sizehint):
        return self._buffer[self._filled : self._expected]

    def buffer_updated(self, nbytes):
        self._filled += nbytes
        if self._filled == self._expected:
            self._filled = 0
            self._done.set_result(None)

    def pull(self, size):
        return self._send([HEAD.pack(False, size)], expected=size)

    def push(self, size):
        return self._send([HEAD.pack(True, size), self.data[:size]], expected=len(DONE))

    def _send(self, buffers, expected):
        self._expected = expected
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(buffers)
        return self._done


async def _send():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Sender, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until it is closed


async def _receive(ports):
    loop = asyncio.get_running_loop()
    lanes = [(await loop.create_connection(_Receiver, "127.0.0.1", port))[1] for port in ports]
    while line := sys.stdin.readline():  # nothing else is to be done meanwhile
        size, steps, pull, push = json.loads(line)
        began = time.perf_counter()
        for _ in range(steps):
            if pull:
                await asyncio.gather(*(lane.pull(size) for lane in lanes))
            if push:
                await asyncio.gather(*(lane.push(size) for lane in lanes))
        print(json.dumps([began, time.perf_counter()]), flush=True)


def _main(role, *ports):
    """``send``: serve and print the port; ``receive PORT…``: measure, one line per order."""
    uvloop.run(_send() if role == "send" else _receive([int(port) for port in ports]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
