"""Connections between tasks: addresses, environment, TLS, handshakes, requests and replies.

Knows ``wire``; what requests mean is decided above. ``endpoint`` listens and connects, ``peer`` is
one connection with requests in both directions, ``platform`` all that a task takes from the machine
(clock, randomness, network, limits). Begin with ``peer``.
"""
