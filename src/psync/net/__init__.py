"""Connections between tasks: requests and replies, TLS, addresses, environment variables.

Knows ``wire``, and of ``closures`` the times between attempts; what requests mean is decided in
later packages. ``endpoint`` listens and connects, ``connection`` is one connection with requests in
both directions, ``platform`` all that a task takes from the machine (clock, randomness, network,
limits). Begin with ``connection``.
"""
