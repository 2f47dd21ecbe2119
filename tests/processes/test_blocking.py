"""Programs without async, as processes: what they print, and how they end."""

from __future__ import annotations

import asyncio
import signal

from process_tools import Screen, script

PRINTED = "fetched [0.0, 1.0, 2.0, 3.0] w [6.0, 6.0]"


async def start(*command: str) -> tuple[asyncio.subprocess.Process, Screen, asyncio.Task[None]]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    screen = Screen()

    async def show() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            screen(line.decode())

    return process, screen, asyncio.create_task(show())


async def test_a_script_starts_a_cluster_trains_and_ends() -> None:
    process, screen, shown = await start(*script("blocking.py"))
    assert await process.wait() == 0, screen.lines
    await shown
    assert screen.lines == [PRINTED]


async def test_under_psync_run_it_is_the_chief() -> None:
    python, path = script("blocking.py")
    run = (python, "-m", "psync", "run", path, "--ps", "1", "--workers", "1", "--", "run")
    process, screen, shown = await start(*run)
    await screen.wait_for("joining")
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 143, screen.lines
    await shown
    assert any(PRINTED in line for line in screen.lines)
    assert any("interrupted" in line for line in screen.lines)


async def test_ctrl_c_ends_what_is_waited_for_and_the_cluster_with_it() -> None:
    process, screen, shown = await start(*script("blocking.py", "wait"))
    await screen.wait_for("joining")
    process.send_signal(signal.SIGINT)
    assert await process.wait() == -signal.SIGINT, screen.lines
    await shown
    assert "interrupted" in screen.lines
    assert screen.lines[-1] == "KeyboardInterrupt"
