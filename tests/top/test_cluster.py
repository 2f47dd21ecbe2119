"""The cluster: jobs, addresses, names."""

from __future__ import annotations

import pickle
from collections import UserDict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.cluster import (
    MAX_TASKS,
    ClusterSpec,
    device_name,
    id_in_cluster,
    is_chief,
    is_loopback,
    join_address,
    parse_task_name,
    split_address,
    task_name,
    validate_for_training,
    with_chief,
    worker_count,
)
from psync.errors import ConfigurationError

FULL = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}
WITHOUT_CHIEF = {job: FULL[job] for job in ("ps", "worker")}
EVALUATED = {**FULL, "evaluator": ["e:1"]}
SPARSE = {"ps": ["p0:1", "p1:1"], "worker": {1: "w1:1", 4: "w4:1"}}


# --- names and addresses -----------------------------------------------------------------------


def test_names_of_tasks_and_devices() -> None:
    assert task_name("ps", 0) == "/job:ps/task:0"
    assert parse_task_name("/job:worker/task:12") == ("worker", 12)
    assert device_name("ps", 3) == "/job:ps/replica:0/task:3/device:CPU:0"


def test_what_is_no_task_name_is_an_error() -> None:
    for name in ["", "ps", "/job:ps", "/job:ps/task:", "/job:ps/task:-1", "/job:ps/task:0\n"]:
        with pytest.raises(ConfigurationError) as caught:
            parse_task_name(name)
        assert str(caught.value) == f"expected a task name such as /job:ps/task:0, got {name!r}"


def test_address_is_split() -> None:
    for address, parts in [
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("ps-0.psync.svc:0", ("ps-0.psync.svc", 0)),
        (":65535", ("", 65535)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]:2222", ("fe80::1%eth0", 2222)),
        ("unix:/run/psync/ps:0", ("/run/psync/ps:0", None)),
        ("unix:/a..b", ("/a..b", None)),
        ("ps_0.bücher.de.:1", ("ps_0.bücher.de.", 1)),
    ]:
        assert split_address(address) == parts
        if parts[1] is not None:
            assert join_address(*parts) == address


def test_malformed_address_is_an_error() -> None:
    long = "x" * 64
    too_long = "unix:/" + "ä" * 54
    no_port = "expected a port from 0 to 65535 at its end"
    no_path = "expected an absolute path after 'unix:'"
    for address, message in [
        ("", no_port),
        ("host", no_port),
        ("host:", no_port),
        ("host:65536", no_port),
        ("host:0x10", no_port),
        ("host:-1", no_port),
        ("host:٣", no_port),
        ("::1:2222", "'::1' is not a host"),
        ("grpc://host:1", "'grpc://host' is not a host"),
        ("my host:1", "'my host' is not a host"),
        ("[::g]:1", "Only hex digits permitted in 'g' in '::g'"),
        ("[::1]", "'[:' is not a host"),
        ("a..b:1", "'a..b' is not a host name"),
        (".:1", "'.' is not a host name"),
        ("\udcff:1", "'\\udcff' is not a host name"),
        (f"{long}.de:1", f"'{long}.de' is not a host name"),
        (f"[fe80::1%{long}]:1", f"'fe80::1%{long}' is not a host name"),
        ("unix:run/ps", no_path),
        ("unix:/a\0b", no_path),
        (too_long, "the path of a Unix socket has at most 107 bytes, got 109"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            split_address(address)
        assert caught.value.message == f"address {address!r}: {message}"
        assert caught.value.hint is not None


def test_loopback_addresses_are_told_from_those_that_others_reach() -> None:
    for host in ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "[::1]", "[::ffff:127.0.0.1]"]:
        assert is_loopback(f"{host}:1")
    assert is_loopback("unix:/run/ps")
    for host in ["10.0.0.1", "", "0.0.0.0", "[::]", "[::ffff:10.0.0.1]", "localhost.example.com"]:
        assert not is_loopback(f"{host}:1")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"(unix:/|\[[0-9:]*\]|[a-z.]*):?[0-9]{0,6}"))
def test_any_text_is_an_address_or_a_configuration_error(text: str) -> None:
    try:
        host, port = split_address(text)
    except ConfigurationError:
        return
    assert port is None or 0 <= port <= 65535
    assert isinstance(host, str)
    assert isinstance(is_loopback(text), bool)


# --- the cluster -------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.sampled_from(["chief", "ps", "worker", "gpu"]),
        st.dictionaries(st.integers(0, 5), st.integers(1, 9), max_size=4),
    ),
    st.randoms(),
)
def test_a_cluster_is_what_it_was_made_of(made: Any, random: Random) -> None:
    jobs = {job: {i: f"{job}{i}:{port}" for i, port in sorted(made[job].items())} for job in made}
    spec = ClusterSpec(jobs)
    assert spec.jobs == list(jobs)
    assert bool(spec) is bool(jobs)
    for job, tasks in jobs.items():
        assert spec.task_indices(job) == list(tasks)
        assert spec.num_tasks(job) == len(tasks)
        assert [spec.task_address(job, index) for index in tasks] == list(tasks.values())
        assert spec.job_tasks(job) == [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]
        dense = tasks and list(tasks) == list(range(len(tasks)))
        assert spec.as_dict()[job] == (list(tasks.values()) if dense else tasks)
    for tasks in spec.as_dict().values():  # it belongs to the caller
        tasks.clear()
    shuffled = random.sample(list(jobs.items()), len(jobs))
    texts = {job: UserDict({str(i): tasks[i] for i in reversed(tasks)}) for job, tasks in shuffled}
    for same in (ClusterSpec(spec), ClusterSpec(texts), ClusterSpec(spec.as_dict())):
        assert (same, hash(same)) == (spec, hash(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec) == f"ClusterSpec({spec.as_dict()!r})"


def test_a_cluster_is_no_other_one_and_no_dict() -> None:
    assert ClusterSpec(FULL) != ClusterSpec({"ps": ["p0:1"]})
    assert ClusterSpec(FULL) != FULL
    assert ClusterSpec({"worker": ("a:1", "b:1")}) == ClusterSpec({"worker": ["a:1", "b:1"]})


def test_wrong_python_types_are_type_errors() -> None:
    no_cluster = "a cluster is a mapping from job name to addresses or another ClusterSpec"
    no_list = "job 'ps': expected a list of addresses or a mapping from index to address"
    for cluster, message in [
        ([("ps", [])], no_cluster),
        (None, f"{no_cluster}, got None"),
        ({1: []}, "the name of a job is a str, got 1"),
        ({"ps": "p0:1"}, no_list),
        ({"ps": None}, no_list),
        ({"ps": ["a:1", None]}, "/job:ps/task:1: an address is a str, got None"),
        ({"ps": {1.5: "a:1"}}, "job 'ps': a task index is an int or a str of digits, got 1.5"),
        ({"ps": {True: "a:1"}}, "job 'ps': a task index is an int or a str of digits, got True"),
    ]:
        with pytest.raises(TypeError) as caught:
            ClusterSpec(cluster)
        assert str(caught.value).startswith(message)


def test_malformed_cluster_names_the_place() -> None:
    no_job = "expected a letter, then letters, digits, '_', '.' or '-'"
    no_index = "job 'ps': expected a task index from 0 to 1048575, got"
    for cluster, message in [
        ({"": []}, f"job name '': {no_job}"),
        ({"a/b": []}, f"job name 'a/b': {no_job}"),
        ({"ps": {"one": "a:1"}}, f"{no_index} 'one'"),
        ({"ps": {"-1": "a:1"}}, f"{no_index} '-1'"),
        ({"ps": {-1: "a:1"}}, f"{no_index} -1"),
        ({"ps": {MAX_TASKS: "a:1"}}, f"{no_index} 1048576"),
        ({"ps": {1: "a:1", "1": "b:1"}}, "/job:ps/task:1 is listed twice"),
        ({"ps": ["h"]}, "/job:ps/task:0: address 'h': expected a port from 0 to 65535 at its end"),
        (
            {"ps": ["host:0"]},
            "/job:ps/task:0: address 'host:0' has no port that the other tasks could connect to",
        ),
        (
            {"ps": [":1"]},
            "/job:ps/task:0: address ':1' has no host that the other tasks could connect to",
        ),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            ClusterSpec(cluster)
        assert caught.value.message == message


def test_two_tasks_with_one_address_are_both_named() -> None:
    for first, second in [
        ("a:1", "a:1"),
        ("A.example:1", "a.EXAMPLE:1"),
        ("[::1]:1", "[0:0::1]:1"),
        ("unix:/run/a", "unix:/run/a"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            ClusterSpec({"ps": ["x:1", first], "worker": {7: second}})
        assert caught.value.message == (
            f"/job:ps/task:1 and /job:worker/task:7 have the same address {second!r}"
        )
        assert caught.value.hint == "give every task its own address"


def test_same_host_with_other_port_is_another_address() -> None:
    assert ClusterSpec({"ps": ["a:1", "a:2", "unix:/a", "unix:/b"]}).num_tasks("ps") == 4


def test_unknown_job_is_an_error_that_lists_the_known() -> None:
    for job in ["gpu", None, ["ps"]]:
        spec = ClusterSpec(SPARSE)
        for question in (spec.num_tasks, spec.task_indices, spec.job_tasks):
            with pytest.raises(ConfigurationError) as caught:
                question(job)
            assert str(caught.value) == f"no job {job!r} in the cluster, which has 'ps', 'worker'"
        with pytest.raises(ConfigurationError, match="in the cluster, which has no jobs"):
            ClusterSpec({}).task_address("ps", 0)


def test_unknown_task_is_an_error_that_lists_the_known() -> None:
    for job, index, message in [
        ("ps", 2, "no task with index 2 in job 'ps', which has tasks 0 to 1"),
        ("ps", -1, "no task with index -1 in job 'ps', which has tasks 0 to 1"),
        ("worker", 0, "no task with index 0 in job 'worker', which has tasks 1, 4"),
        ("chief", "0", "no task with index '0' in job 'chief', which has only task 0"),
        ("evaluator", None, "no task with index None in job 'evaluator', which has no tasks"),
    ]:
        spec = ClusterSpec({**SPARSE, "chief": ["c:1"], "evaluator": []})
        with pytest.raises(ConfigurationError) as caught:
            spec.task_address(job, index)
        assert str(caught.value) == message


def test_clusters_that_suit_a_task() -> None:
    for cluster, task_type, task_id in [
        *((FULL, *task) for task in [("chief", 0), ("worker", 2), ("ps", 1), (None, 3)]),
        (WITHOUT_CHIEF, None, None),
        (FULL, "evaluator", 0),
        ({"ps": ["p0:1"], "worker": {3: "w3:1"}}, "worker", 3),  # it may know only itself
        ({"worker": {3: "w3:1"}}, "worker", 3),
        ({"ps": {1: "p1:1"}}, "ps", 1),
    ]:
        spec = ClusterSpec(cluster)
        assert validate_for_training(spec, task_type, task_id) == (spec, task_type, task_id)
    assert validate_for_training(ClusterSpec(FULL), "chief", None)[2] == 0, "the only one"


def test_master_is_accepted_for_chief() -> None:
    master = ClusterSpec({"master" if job == "chief" else job: FULL[job] for job in FULL})
    chief = ClusterSpec(FULL)
    assert with_chief(master) == chief
    assert with_chief(chief) is chief
    assert validate_for_training(master, "master", 0) == (chief, "chief", 0)


def test_evaluator_is_left_out_of_the_training_cluster() -> None:
    spec = ClusterSpec(EVALUATED)
    for task_type in ("chief", "evaluator"):
        assert validate_for_training(spec, task_type, 0) == (ClusterSpec(FULL), task_type, 0)


def test_unfit_cluster_is_an_error_that_names_the_field() -> None:
    known, two = "'chief', 'worker', 'ps' or 'evaluator'", ["d:1", "d:2"]
    for cluster, task_type, task_id, message in [
        ({}, "worker", 0, "cluster is missing or empty"),
        ({**FULL, "gpu": []}, "worker", 0, f"cluster.gpu: expected the jobs {known}, got 'gpu'"),
        (
            {**FULL, "master": ["m:1"]}, "chief", 0,
            "cluster: the cluster has both a 'chief' and a 'master', which are the same job",
        ),
        ({**FULL, "chief": two}, "chief", 0, "cluster.chief: expected at most one chief, got 2"),
        (
            {**FULL, "evaluator": two}, "chief", 0,
            "cluster.evaluator: expected at most one evaluator, got 2",
        ),
        ({"worker": ["w:1"]}, None, None, "cluster.ps: expected at least one ps, got none"),
        (
            {"chief": ["c:1"], "ps": ["p:1"], "worker": []}, "chief", 0,
            "cluster.worker: expected at least one worker, got none",
        ),
        (FULL, "foobar", 0, f"task.type: expected {known}, got 'foobar'"),
        (SPARSE, "chief", 0, "task.type is 'chief', but the cluster has only 'ps', 'worker'"),
        (FULL, "ps", 2, "task.index is 2, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", -1, "task.index is -1, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", None, "task.index is missing, and the job 'ps' has tasks 0 to 1"),
        (SPARSE, "worker", 0, "task.index is 0, and the job 'worker' has tasks 1, 4"),
        (EVALUATED, "evaluator", 1, "task.index is 1, and the job 'evaluator' has only task 0"),
    ]:  # fmt: skip
        with pytest.raises(ConfigurationError) as caught:
            validate_for_training(ClusterSpec(cluster), task_type, task_id, source="TF_CONFIG")
        assert caught.value.message == f"TF_CONFIG: {message}"


def test_task_of_the_wrong_python_type_is_a_type_error() -> None:
    for task_type, task_id in [(1, 0), ("ps", "0")]:
        with pytest.raises(TypeError) as caught:
            validate_for_training(ClusterSpec(FULL), task_type, task_id)
        assert str(caught.value) == (
            "cluster: expected a task type (str) and a task index (int), or None, got "
            f"{task_type!r} and {task_id!r}"
        )


# --- who is who --------------------------------------------------------------------------------


def test_the_chief_is_the_chief_or_worker_0() -> None:
    for cluster, job, index, chief in [
        (FULL, "chief", 0, True),
        (FULL, "master", None, True),
        (FULL, "worker", 0, False),
        (FULL, "ps", 0, False),
        (EVALUATED, "evaluator", 0, True),
        (FULL, "evaluator", 0, True),
        (WITHOUT_CHIEF, "worker", 0, True),
        (WITHOUT_CHIEF, "worker", 1, False),
        (WITHOUT_CHIEF, "ps", 0, False),
        (WITHOUT_CHIEF, None, None, False),
        ({"master": ["m:1"], **WITHOUT_CHIEF}, "worker", 0, False),
    ]:
        assert is_chief(ClusterSpec(cluster), job, index) is chief


def test_chief_and_workers_are_counted_and_evaluators_apart() -> None:
    for cluster, job, count in [
        (FULL, "worker", 4),
        (FULL, "chief", 4),
        (EVALUATED, "worker", 4),
        (EVALUATED, "evaluator", 1),
        (FULL, "evaluator", 0),
        (WITHOUT_CHIEF, "worker", 3),
        (SPARSE, "worker", 2),
    ]:
        assert worker_count(ClusterSpec(cluster), job) == count


def test_workers_are_numbered_after_the_chief() -> None:
    for cluster, job, index, number in [
        (FULL, "chief", 0, 0),
        (FULL, "worker", 0, 1),
        (FULL, "worker", 2, 3),
        (WITHOUT_CHIEF, "worker", 2, 2),
        (EVALUATED, "evaluator", 0, 0),
        (SPARSE, "worker", 4, 4),
    ]:
        assert id_in_cluster(ClusterSpec(cluster), job, index) == number


def test_a_ps_is_neither_counted_nor_numbered() -> None:
    spec = ClusterSpec(FULL)
    for ask in (lambda: worker_count(spec, "ps"), lambda: id_in_cluster(spec, "ps", 0)):
        with pytest.raises(ConfigurationError, match="expected 'chief', 'worker' or 'evaluator'"):
            ask()


def test_who_is_not_in_the_cluster_has_no_place_in_it() -> None:
    spec = ClusterSpec(FULL)
    with pytest.raises(ConfigurationError, match="the job 'worker' has tasks 0 to 2"):
        is_chief(spec, "worker", 3)
    with pytest.raises(ConfigurationError, match="got 'foobar'"):
        id_in_cluster(spec, "foobar", 0)
