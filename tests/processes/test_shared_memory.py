"""Tasks that share memory are killed and stopped: values stay right, and nothing is left of it."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from real_training import DEADLY, training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SIZE = 1 << 18
"""Elements of a variable of one MiB: one block, which is read as a whole."""

KILLS = 7
SPARE_KIB = 24 << 10  # three slabs: what comes and goes, and would be exceeded by a leak per kill


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mapped_kib(pid: int) -> int:
    """Memory of regions that a process maps, its own and those of others."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "/memfd:psync" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges) >> 10


def shared_kib(pid: int) -> int:
    found = re.search(r"^Pss_Shmem: *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1])


def addresses_of(cluster: psync.LocalCluster) -> tuple[str, ...]:
    spec = cluster.resolver.cluster_spec().as_dict()
    return tuple(f"/{address}" for addresses in spec.values() for address in addresses)


def left_of(addresses: tuple[str, ...]) -> list[str]:
    """Doors beside these addresses, and files of shared memory."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    doors = [line for line in sockets if " @psync/" in line and line.endswith(addresses)]
    files = [name for name in os.listdir("/dev/shm") if "psync" in name]
    return doors + [name for name in files if not name.startswith("psync-sim-")]  # disks of others


class Survivors:
    """What tasks that live on have open and mapped, after each kill of others."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, int, int]]] = {}

    def note(self, *pids: int) -> None:
        for pid in pids:
            now = num_fds(pid), mapped_kib(pid), shared_kib(pid)
            self.seen.setdefault(pid, []).append(now)

    def check(self) -> None:
        """The first two show what there is in turn; the last ones are not more."""
        for pid, seen in self.seen.items():
            if len(seen) < KILLS - 2:
                continue  # it was killed itself
            files, mapped, shared = zip(*seen, strict=True)
            assert min(files[-2:]) <= max(files[:3]), (pid, seen)
            assert min(mapped[-2:]) <= max(mapped[:3]) + SPARE_KIB, (pid, seen)
            assert min(shared[-2:]) <= max(shared[:3]) + SPARE_KIB, (pid, seen)


def held_by(coordinator: psync.ClusterCoordinator, index: int) -> int:
    """How many closures a worker has been sent and has not answered."""
    workers = coordinator.statistics()["closures"].workers
    return sum(each.in_flight for each in workers if each.worker == f"/job:worker/task:{index}")


async def add(variable: Any) -> bool:
    """Read it, and add one; return whether it was read as a whole."""
    value = await variable.read()
    await variable.assign_add(np.ones(SIZE, np.float32))
    return bool((value == value[0]).all())


async def test_a_ps_is_killed_and_its_memory_goes_with_it() -> None:
    survivors = Survivors()
    async with psync.LocalCluster(2, 2, max_restarts=100) as cluster:
        addresses = addresses_of(cluster)
        strategy = psync.ParameterServerStrategy(
            cluster.resolver, psync.FixedShardsPartitioner(2), ps_recovery="backup"
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                variable = psync.Variable(np.zeros(2 * SIZE, np.float32), name="variable")

            async def more() -> None:
                await variable.assign_add(np.ones(2 * SIZE, np.float32))

            scheduled = 0
            for number in range(KILLS):
                await coordinator.backed_up()
                for _ in range(40):
                    coordinator.schedule(more)
                scheduled += 40
                while (await variable.read()).max() < scheduled - 30 + 3 * number:
                    continue
                os.kill(cluster.tasks[f"ps-{number % 2}"].pid, signal.SIGKILL)
                await coordinator.join()
                assert (await variable.read() == scheduled).all()
                await coordinator.backed_up()
                workers = [cluster.tasks[f"worker-{index}"].pid for index in (0, 1)]
                survivor = cluster.tasks[f"ps-{1 - number % 2}"].pid
                assert mapped_kib(survivor), "memory is shared"
                survivors.note(*workers, os.getpid())
    survivors.check()
    assert left_of(addresses) == []


@pytest.mark.promise("reads.stable", "memory.stable-while-read")
async def test_values_of_two_ps_tasks_stay_as_they_were_read_while_updates_go_on() -> None:
    """They lie in one array, of which each half is the memory of another process."""
    held: list[np.ndarray] = []
    async with training(2, 1) as (_, strategy, coordinator):
        with strategy.scope():
            variable = psync.Variable(np.zeros((2 * SIZE, 2), np.float32), name="variable")

        async def more() -> None:
            await variable.assign_add(np.ones((2 * SIZE, 2), np.float32))

        for number in range(8):
            held.append(await psync.pull(variable))
            await coordinator.schedule(more)
            if number == 5:
                del held[1:4]
        assert mapped_kib(os.getpid()), "memory is shared"
    assert [float(each[0, 0]) for each in held] == [0, 4, 5, 6, 7]
    for each in held:  # also when the processes have ended
        assert (each == each[0, 0]).all()


@pytest.mark.promise("memory.stable-while-read")
async def test_a_stopped_worker_holds_up_nobody_and_what_it_has_stays_as_it_is() -> None:
    async with training(1, 2) as (cluster, strategy, coordinator):
        with strategy.scope():
            variable = psync.Variable(np.zeros(SIZE, np.float32), name="variable")
        values: list[Any] = []
        stopped = cluster.tasks["worker-0"].pid
        for _ in range(4):
            values += [coordinator.schedule(add, args=(variable,)) for _ in range(40)]
            while (await variable.read()).max() < len(values) - 30:
                continue
            os.kill(stopped, signal.SIGSTOP)
            # The other one goes on, until nothing is left but what the stopped one has.
            while (await variable.read()).min() < len(values) - held_by(coordinator, 0):
                continue
            os.kill(stopped, signal.SIGCONT)
            await coordinator.join()
            assert (await variable.read() == len(values)).all()
        assert all(await coordinator.fetch(values))


STRANGER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(20)
    sock.connect("\\0" + sys.argv[1])
    _, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
    sys.exit(10 + len(descriptors))
"""


@pytest.mark.promise("memory.same-user-only", "memory.one-writer")
async def test_another_user_is_let_in_by_no_door_and_nobody_else_can_write() -> None:
    async with training(1, 1) as (cluster, strategy, coordinator):
        with strategy.scope():
            variable = psync.Variable(np.zeros(SIZE, np.float32), name="variable")
        await coordinator.schedule(add, args=(variable,))
        folder = Path(f"/proc/{cluster.tasks['ps-0'].pid}/fd")
        regions = [each for each in folder.iterdir() if "memfd:psync" in os.readlink(each)]
        assert regions
        for region in regions:
            with pytest.raises(PermissionError), open(region, "r+b") as file:
                mmap.mmap(file.fileno(), 4096)
        doors = [door.split(" @")[1] for door in left_of(addresses_of(cluster)) if " @" in door]
        for door in doors if os.getuid() == 0 else ():  # who else can be another user?
            stranger = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STRANGER, door, stderr=asyncio.subprocess.PIPE
            )
            await stranger.communicate()
            assert stranger.returncode in (1, 10), "an error, or no descriptor"
        await coordinator.schedule(add, args=(variable,))
        assert (await variable.read() == 2).all()


@pytest.mark.parametrize("text", ["0", "1"])
async def test_a_cluster_shares_memory_unless_it_is_switched_off(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSYNC_SHARED_MEMORY", text)
    async with training(1, 1) as (cluster, strategy, coordinator):
        with strategy.scope():
            variable = psync.Variable(np.zeros(SIZE, np.float32), name="variable")
        await coordinator.schedule(add, args=(variable,))
        assert (await variable.read() == 1).all()
        pids = [cluster.tasks[name].pid for name in ("ps-0", "worker-0")]
        assert [mapped_kib(pid) > 0 for pid in pids] == [text == "1"] * 2


@pytest.mark.parametrize("task", ["worker-0", "ps-0"])
async def test_a_task_without_descriptors_goes_on_through_sockets(task: str) -> None:
    async with training(2, 1) as (cluster, strategy, coordinator):
        with strategy.scope():
            variables = [
                psync.Variable(np.zeros(9 * SIZE, np.float32), name=f"variable_{number}")
                for number in range(8)  # each has a region on either ps
            ]
        sgd = psync.optimizers.SGD(1.0)

        async def step() -> bool:
            values = await psync.pull(variables)
            gradients = psync.empty_like(variables)  # each has a region
            for gradient in gradients:
                gradient.fill(-1)
            pairs = list(zip(gradients, variables, strict=True))
            await sgd.apply_gradients(pairs)
            return all((value == value[0]).all() for value in values)

        pid = cluster.tasks[task].pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_fds(pid) + 6, hard))
        for number in range(1, 4):
            assert await coordinator.schedule(step)
            values = await psync.pull(variables)
            assert all((value == number).all() for value in values)
        whole = mapped_kib(cluster.tasks["ps-1"].pid)
        assert mapped_kib(pid) < whole, "memory is shared with those who can"


MOMENTS = (
    "read", "made", "computed", "begun", "1 turn", "3 turns", "9 turns", "pushed", "read again",
)  # fmt: skip


def die_once(flag: Path) -> None:
    """Kill this process, unless one was killed here before."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("synchronous", [False, True])
async def test_a_worker_dies_at_each_moment_of_a_step_and_what_it_held_is_free_again(
    synchronous: bool, tmp_path: Path
) -> None:
    survivors = Survivors()
    size = 4 * SIZE + 10
    async with training(2, 2, **DEADLY) as (cluster, strategy, coordinator):
        with strategy.scope():
            variable = psync.Variable(np.zeros(size, np.float32), name="variable")
            count = psync.get_or_create_global_step()
        optimizer: Any = psync.optimizers.SGD(1.0)
        if synchronous:
            optimizer = psync.SyncReplicasOptimizer(optimizer, 2)

        async def step(moment: str) -> None:
            def now(name: str) -> None:
                if name == moment:
                    die_once(tmp_path / moment)

            value = await variable.read()  # lent by both ps tasks
            now("read")
            (gradient,) = psync.empty_like([variable])  # to be lent to both
            now("made")
            gradient.fill(-1)
            now("computed")
            pairs = [(gradient, variable)]
            push = asyncio.ensure_future(optimizer.apply_gradients(pairs, global_step=count))
            now("begun")
            for turn in range(1, 10):
                await asyncio.sleep(0)
                now(f"{turn} turn{'s' if turn > 1 else ''}")
            await push
            now("pushed")
            again = await variable.read()
            now("read again")
            assert (again >= value).all()  # equal if an earlier run of it has counted

        async def lent(what: str) -> int:
            each = await coordinator.ps_statistics()
            return sum(int(ps["network"][what]) for ps in each)

        for number, moment in enumerate(MOMENTS, 1):
            for _ in range(12):
                coordinator.schedule(step, args=(moment,))
            await coordinator.join()
            assert (tmp_path / moment).exists()
            updates = await count.read()
            assert updates == 12 * number or (synchronous and updates >= 6 * number)
            assert (await variable.read() == updates).all()
            while await lent("bytes_lent_now") or await lent("bytes_kept_now"):
                continue  # the kernel ends the side channels of who has died
            survivors.note(*(cluster.tasks[f"ps-{index}"].pid for index in (0, 1)), os.getpid())
    survivors.check()
