"""A floor: as ``raw_tcp.py``, through Unix sockets."""

from raw_tcp import main

if __name__ == "__main__":
    main("raw Unix sockets", "unix")
