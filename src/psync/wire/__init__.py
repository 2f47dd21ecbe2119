"""The wire format: frames, handshake, and every message between tasks.

Pure: knows errors and specs, does no I/O. ``frames`` has the layout of bytes, ``codec`` turns
messages into msgpack headers, ``protocol`` runs one connection from the handshake on; ``messages``
has what every connection begins with, ``*_messages`` what each pair of tasks says to each other.

A message is a frozen class with a number below 128. A new one takes a number that none has ever
had, and a line of golden bytes in the test of its module. Begin with ``protocol``.
"""
