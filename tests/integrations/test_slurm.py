from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError
from psync.integrations.slurm import SlurmClusterResolver, expand_hostlist, expand_task_counts
from psync.net.resolvers import training_cluster

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[9-10],m5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
JOBS = {"worker": 2, "chief": 1, "ps": 2}


def step(**changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**STEP, **changes}.items() if value is not None}


def test_host_lists_are_expanded() -> None:
    for text, hosts in [
        ("n1", ["n1"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001,3]", ["n001", "n3"]),
        ("rack[0-1]n[2,4]-ib", ["rack0n2-ib", "rack0n4-ib", "rack1n2-ib", "rack1n4-ib"]),
        ("[1-2]a", ["1a", "2a"]),
        ("a-b.c,d", ["a-b.c", "d"]),
    ]:
        assert expand_hostlist(text) == hosts


def test_malformed_or_endless_host_lists_are_errors() -> None:
    for text in ["", ",", "n1,", ",n1", "n1,,n2", "n[1-2", "n1]", "n[]", "n[1-]", "n[a]", "n[2-1]",
                 "n[[1]]", "n[1-2,]", "n 1", "n[0-9999999]", "a[0-999]b[0-999]c[0-999]",
                 "n[0-1]" * 40]:  # fmt: skip
        with pytest.raises(ConfigurationError, match="SlurmClusterResolver: host list: expected "):
            expand_hostlist(text)


@settings(deadline=None)
@given(st.text("n1,[]-0 9", max_size=30))
def test_any_text_is_a_host_list_or_a_configuration_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ConfigurationError:
        return
    assert hosts
    assert not any(set(host) & set(",[] ") for host in hosts)


def test_task_counts_are_expanded() -> None:
    for text, counts in [
        ("4", [4]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("0,1", [0, 1]),
    ]:
        assert expand_task_counts(text) == counts


def test_jobs_take_the_ranks_in_the_order_of_their_names_node_by_node() -> None:
    resolver = SlurmClusterResolver(JOBS, environ=step())
    assert resolver.cluster_spec() == ClusterSpec(
        {"chief": ["n9:8888"], "ps": ["n9:8889", "n10:8888"], "worker": ["n10:8889", "m5:8888"]}
    )
    assert resolver.get_task_info() == ("worker", 0)
    assert training_cluster(resolver)[1:] == ("worker", 0)


def test_each_rank_is_one_task() -> None:
    for rank, task in [
        (0, ("chief", 0)),
        (1, ("ps", 0)),
        (2, ("ps", 1)),
        (3, ("worker", 0)),
        (4, ("worker", 1)),
    ]:
        resolver = SlurmClusterResolver(JOBS, environ=step(SLURM_PROCID=str(rank)))
        assert (resolver.task_type, resolver.task_id) == task


def test_a_missing_variable_is_named() -> None:
    for variable in list(STEP):
        with pytest.raises(
            ConfigurationError, match=f"SlurmClusterResolver: {variable} is not set"
        ):
            SlurmClusterResolver(environ=step(**{variable: None}))


def test_what_does_not_fit_is_told() -> None:
    for changes, arguments, message in [
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID: expected a number, got 'x'"),
        ({"SLURM_PROCID": "5"}, {}, "SLURM_PROCID: expected a rank below 5, got '5'"),
        ({}, {"jobs": {"ps": 1, "worker": 2}}, "the jobs have 3 tasks .*, but the job step has 5"),
        ({}, {"jobs": {"ps": -1, "worker": 6}}, "jobs: expected whole numbers"),
        ({}, {"jobs": {"ps": 2.0, "worker": 3}}, "jobs: expected whole numbers"),
        ({}, {"jobs": {"p s": 5}}, "job name 'p s'"),
        ({}, {"jobs": {}, "tasks_per_node": {}}, "expected a rank below 0"),
        ({}, {"tasks_per_node": {"a": "5"}}, "tasks per node: expected whole numbers"),
        ({}, {"port_base": 70000}, "address 'n9:70000': expected a port"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, {}, "3 nodes in SLURM_STEP_NODELIST, 1 in"),
        ({}, {"gpus_per_node": 3, "gpus_per_task": 2}, "2 tasks of 2 GPUs on a node that has 3"),
        ({"SLURMD_NODENAME": "n9"}, {}, "rank 3 is task 1 of node 'n9', expected task 1 of 'n10'"),
        ({"SLURM_LOCALID": "0"}, {}, "rank 3 is task 0 of node 'n10', expected task 1 of 'n10'"),
    ]:  # fmt: skip
        with pytest.raises(ConfigurationError, match=message):
            SlurmClusterResolver(environ=step(**changes), **arguments)


def test_ranks_given_out_node_by_node_are_what_is_expected() -> None:
    SlurmClusterResolver(environ=step(SLURMD_NODENAME="n10", SLURM_LOCALID="1"))


def test_gpus_that_it_is_told_of_are_given_out() -> None:
    for arguments, gpus, visible in [
        ({"gpus_per_node": 4}, 2, "2,3"),
        ({"gpus_per_task": 3}, 3, "3,4,5"),
        ({"gpus_per_node": 8, "gpus_per_task": 1}, 1, "1"),
        ({"gpus_per_node": 4, "auto_set_gpu": False}, 2, None),
        ({"gpus_per_node": 1}, 0, None),
        ({}, 0, None),
    ]:
        environ = step()
        resolver = SlurmClusterResolver(environ=environ, **arguments)
        assert resolver.num_accelerators() == ({"GPU": gpus} if gpus else {})
        assert environ.get("CUDA_VISIBLE_DEVICES") == visible
