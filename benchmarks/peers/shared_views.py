"""A floor: as ``raw_tcp.py``, through shared memory, where nobody copies anything."""

from raw_tcp import main

if __name__ == "__main__":
    main("shared memory, no copy", "views")
