"""What the environment says: TF_CONFIG, SLURM's variables, psync's own.

What comes out: an answer, or ConfigurationError.
"""

from __future__ import annotations

import contextlib

from driver import OneInput, fuzz

SLURM = (
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
    "SLURMD_NODENAME", "SLURM_LOCALID",
)  # fmt: skip
OWN = (
    "PSYNC_SECRET", "PSYNC_INSECURE", "PSYNC_FAILPOINTS", "PSYNC_TESTING_LOSS",
    "PSYNC_WATCHDOG_TIMEOUT", "TF_CLUSTER_COORDINATOR_WATCH_DOG_TIMEOUT", "PSYNC_CHIEF_TIMEOUT",
    "PSYNC_LIMIT_HEADER_BYTES", "PSYNC_LIMIT_CONNECTIONS",
)  # fmt: skip


def setup() -> tuple[OneInput, list[bytes]]:
    import json
    import os

    from psync.errors import ConfigurationError
    from psync.integrations.slurm import SlurmClusterResolver
    from psync.net.environment import parts_of
    from psync.net.platform import chief_timeouts, flag, limits_of, watchdog_timeout
    from psync.net.resolvers import TFConfigClusterResolver, training_cluster
    from psync.net.secret import load_secret

    def tf_config(text: str) -> None:
        before = os.environ.get("TF_CONFIG")
        os.environ["TF_CONFIG"] = text
        try:
            resolver = TFConfigClusterResolver()
            for question in (
                resolver.cluster_spec,
                resolver.master,
                lambda: (resolver.task_type, resolver.task_id),
                lambda: (resolver.rpc_layer, resolver.environment),
                lambda: training_cluster(resolver),
            ):
                with contextlib.suppress(ConfigurationError):
                    question()
        finally:
            del os.environ["TF_CONFIG"]
            if before is not None:
                os.environ["TF_CONFIG"] = before

    def slurm(texts: list[str]) -> None:
        environ = dict(zip(SLURM, texts, strict=False))
        with contextlib.suppress(ConfigurationError):
            resolver = SlurmClusterResolver(environ=environ)
            resolver.cluster_spec()
            resolver.get_task_info()

    def own(texts: list[str]) -> None:
        environ = dict(zip(OWN, texts, strict=False))
        for read in (
            load_secret, lambda given: flag(given, "PSYNC_INSECURE"), parts_of, watchdog_timeout,
            chief_timeouts, limits_of,
        ):  # fmt: skip
            with contextlib.suppress(ConfigurationError):
                read(environ)

    def one_input(data: bytes) -> None:
        # As the environment has it: no zero bytes, what is no UTF-8 escaped.
        text = data[1:].decode("utf-8", "surrogateescape").replace("\x00", "")
        which = data[0] % 3 if data else 0
        if which == 0:
            tf_config(text)
        elif which == 1:
            slurm(text.split("\x1f"))
        else:
            own(text.split("\x1f"))

    cluster = {"chief": ["c:1"], "ps": ["p0:1", "[::1]:2"], "worker": {"1": "unix:/w"}}
    configs = [
        {"cluster": cluster, "task": {"type": "worker", "index": 1}, "environment": "cloud"},
        {"cluster": {"master": ["m:1"], "evaluator": ["e:1"]}, "task": {"type": "master"}},
        {"task": {"type": "evaluator", "index": "0"}, "rpc_layer": "grpc"},
    ]
    steps = [
        ("1", "3", "n[1-2],m07", "1(x3)", "n2", "0"),
        ("0", "4", "a[001-002]b", "2(x2)"),
    ]
    settings = [
        ("s" * 40, "1", "ps.push.applied=kill@3", '{"Update": {"reply": 0.1, "min_each": 2}}', "90",
         "-1", "none", "4096", "10"),
    ]  # fmt: skip
    seeds = [b"\x00" + json.dumps(config).encode() for config in configs]
    seeds += [b"\x01" + "\x1f".join(texts).encode() for texts in steps]
    seeds += [b"\x02" + "\x1f".join(texts).encode() for texts in settings]
    return one_input, seeds


if __name__ == "__main__":
    fuzz(__file__, setup)
