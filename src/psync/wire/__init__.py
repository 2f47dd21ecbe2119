"""Bytes and messages: frames, codecs, and the messages of the protocol.

Pure: knows errors and specs, does no I/O. ``protocol`` turns received bytes into frames and
messages and back; ``messages`` has what every connection begins with, ``*_messages`` what each pair
of tasks says to each other, ``catalogue`` the number of each. Begin with ``protocol``.
"""
