"""Runs Python blocks of a page in one namespace, with ``await`` at their top, as a notebook does.

Reads a line of JSON for each block from stdin and answers with one on stdout. What blocks, and the
processes that they start, print goes to a file instead.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import os
import sys
import tempfile
import traceback
from asyncio import Runner
from typing import TextIO


def main() -> None:
    answers: TextIO = os.fdopen(os.dup(1), "w")
    printed = tempfile.TemporaryFile("w+")
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    namespace = sys.modules["__main__"].__dict__
    sys.path.insert(0, "")
    with Runner() as runner:
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            printed.seek(0)
            printed.truncate()
            error = ""
            try:
                name = f"<{request['file']}:{request['line']}>"
                code = request["code"]
                linecache.cache[name] = (len(code), None, code.splitlines(True), name)
                compiled = compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

                async def cell(compiled: object = compiled) -> None:
                    done = eval(compiled, namespace)
                    if inspect.isawaitable(done):
                        await done

                runner.run(cell())
            except BaseException:
                error = traceback.format_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            with open(f"/proc/self/fd/{printed.fileno()}") as file:
                said = file.read()
            answers.write(json.dumps({"printed": said, "error": error, "number": number}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
