"""A floor: as ``raw_tcp.py``, through shared memory, with one copy of what is pulled or pushed."""

from raw_tcp import main

if __name__ == "__main__":
    main("shared memory", "memory")
