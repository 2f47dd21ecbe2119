"""Print COUNT numbered lines on stdout and on stderr in turn, the last without a newline."""

import sys

count = int(sys.argv[1])
for number in range(count):
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        end = "" if number == count - 1 else "\n"
        stream.write(f"{name} {number} {'x' * 100}{end}")
