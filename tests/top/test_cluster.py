"""The cluster: jobs, addresses, names."""

from __future__ import annotations

import pickle
from collections import UserDict

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
SPARSE = {"ps": ["p0:1", "p1:1"], "worker": {1: "w1:1", 4: "w4:1"}}


# --- names and addresses -----------------------------------------------------------------------


def test_names_of_tasks_and_devices() -> None:
    assert task_name("ps", 0) == "/job:ps/task:0"
    assert parse_task_name("/job:worker/task:12") == ("worker", 12)
    assert device_name("ps", 3) == "/job:ps/replica:0/task:3/device:CPU:0"


def test_what_is_no_task_name_is_an_error() -> None:
    for name in [
        "",
        "ps",
        "/job:ps",
        "/job:ps/task:",
        "/job:ps/task:-1",
        "/job:ps/task:0\n",
        "/job:/task:0",
    ]:
        with pytest.raises(ConfigurationError) as caught:
            parse_task_name(name)
        assert str(caught.value) == f"expected a task name such as /job:ps/task:0, got {name!r}"


def test_an_address_is_put_together() -> None:
    assert join_address("10.0.0.1", 80) == "10.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"


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


def test_malformed_address_is_an_error() -> None:
    for address, message in [
        ("", "address '': expected a port from 0 to 65535 at its end"),
        ("host", "address 'host': expected a port from 0 to 65535 at its end"),
        ("host:", "address 'host:': expected a port from 0 to 65535 at its end"),
        ("host:65536", "address 'host:65536': expected a port from 0 to 65535 at its end"),
        ("host:0x10", "address 'host:0x10': expected a port from 0 to 65535 at its end"),
        ("host:-1", "address 'host:-1': expected a port from 0 to 65535 at its end"),
        ("host:٣", "address 'host:٣': expected a port from 0 to 65535 at its end"),
        ("::1:2222", "address '::1:2222': '::1' is not a host"),
        ("grpc://host:1", "address 'grpc://host:1': 'grpc://host' is not a host"),
        ("my host:1", "address 'my host:1': 'my host' is not a host"),
        ("[::g]:1", "address '[::g]:1': Only hex digits permitted in 'g' in '::g'"),
        ("[::1]", "address '[::1]': '[:' is not a host"),
        ("a..b:1", "address 'a..b:1': 'a..b' is not a host name"),
        (".:1", "address '.:1': '.' is not a host name"),
        ("\udcff:1", "address '\\udcff:1': '\\udcff' is not a host name"),
        (f"{'x' * 64}.de:1", f"address '{'x' * 64}.de:1': '{'x' * 64}.de' is not a host name"),
        (
            f"[fe80::1%{'x' * 64}]:1",
            f"address '[fe80::1%{'x' * 64}]:1': 'fe80::1%{'x' * 64}' is not a host name",
        ),
        ("unix:run/ps", "address 'unix:run/ps': expected an absolute path after 'unix:'"),
        ("unix:/a\0b", "address 'unix:/a\\x00b': expected an absolute path after 'unix:'"),
        (
            "unix:/" + "ä" * 54,
            f"address {'unix:/' + 'ä' * 54!r}: the path of a Unix socket has at most 107 bytes, "
            "got 109",
        ),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            split_address(address)
        assert caught.value.message == message
        assert caught.value.hint is not None


def test_loopback_addresses() -> None:
    for address in [
        "127.0.0.1:1",
        "127.8.8.8:1",
        "localhost:1",
        "LOCALHOST:1",
        "[::1]:1",
        "[::ffff:127.0.0.1]:1",
        "unix:/run/ps",
    ]:
        assert is_loopback(address)


def test_addresses_that_others_reach() -> None:
    for address in [
        "10.0.0.1:1",
        ":1",
        "0.0.0.0:1",
        "[::]:1",
        "[::ffff:10.0.0.1]:1",
        "localhost.example.com:1",
    ]:
        assert not is_loopback(address)


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


def test_dense_cluster_answers_every_question() -> None:
    spec = ClusterSpec(FULL)
    assert spec.jobs == ["chief", "ps", "worker"]
    assert spec.as_dict() == FULL
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("worker") == [0, 1, 2]
    assert spec.task_address("ps", 1) == "p1:1"
    assert spec.job_tasks("ps") == ["p0:1", "p1:1"]


def test_sparse_cluster_has_holes() -> None:
    spec = ClusterSpec(SPARSE)
    assert spec.as_dict() == SPARSE
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 4]
    assert spec.job_tasks("worker") == [None, "w1:1", None, None, "w4:1"]


def test_indices_may_be_text_and_in_any_order() -> None:
    spec = ClusterSpec({"worker": UserDict({"1": "b:1", 0: "a:1"})})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"]}
    assert spec == ClusterSpec({"worker": ("a:1", "b:1")})


def test_empty_job_is_an_empty_dict() -> None:
    spec = ClusterSpec({"worker": []})
    assert spec.as_dict() == {"worker": {}}
    assert spec.num_tasks("worker") == 0
    assert spec.job_tasks("worker") == []


def test_cluster_is_true_if_it_has_jobs() -> None:
    assert ClusterSpec(FULL)
    assert not ClusterSpec({})


def test_clusters_are_equal_by_content() -> None:
    spec = ClusterSpec(FULL)
    assert spec == ClusterSpec(dict(reversed(FULL.items())))
    assert hash(spec) == hash(ClusterSpec(dict(reversed(FULL.items()))))
    assert spec != ClusterSpec({"ps": ["p0:1"]})
    assert spec != FULL


def test_cluster_is_copied_from_another_and_through_a_pickle() -> None:
    spec = ClusterSpec(SPARSE)
    assert ClusterSpec(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec) == f"ClusterSpec({SPARSE!r})"


def test_what_as_dict_returns_belongs_to_the_caller() -> None:
    spec = ClusterSpec(SPARSE)
    for tasks in spec.as_dict().values():
        tasks.clear()
    assert spec.as_dict() == SPARSE


def test_wrong_python_types_are_type_errors() -> None:
    for cluster, message in [
        ([("ps", [])], "a cluster is a mapping from job name to addresses or another ClusterSpec"),
        (
            None,
            "a cluster is a mapping from job name to addresses or another ClusterSpec, got None",
        ),
        ({1: []}, "the name of a job is a str, got 1"),
        (
            {"ps": "p0:1"},
            "job 'ps': expected a list of addresses or a mapping from index to address",
        ),
        ({"ps": None}, "job 'ps': expected a list of addresses or a mapping from index to address"),
        ({"ps": [1]}, "/job:ps/task:0: an address is a str, got 1"),
        ({"ps": ["a:1", None]}, "/job:ps/task:1: an address is a str, got None"),
        ({"ps": {1.5: "a:1"}}, "job 'ps': a task index is an int or a str of digits, got 1.5"),
        ({"ps": {True: "a:1"}}, "job 'ps': a task index is an int or a str of digits, got True"),
    ]:
        with pytest.raises(TypeError) as caught:
            ClusterSpec(cluster)
        assert str(caught.value).startswith(message)


def test_malformed_cluster_names_the_place() -> None:
    for cluster, message in [
        ({"": []}, "job name '': expected a letter, then letters, digits, '_', '.' or '-'"),
        ({"a/b": []}, "job name 'a/b': expected a letter, then letters, digits, '_', '.' or '-'"),
        ({"ps": {"one": "a:1"}}, "job 'ps': expected a task index, got 'one'"),
        ({"ps": {"-1": "a:1"}}, "job 'ps': expected a task index, got '-1'"),
        ({"ps": {-1: "a:1"}}, "job 'ps': expected a task index from 0 to 1048575, got -1"),
        (
            {"ps": {MAX_TASKS: "a:1"}},
            "job 'ps': expected a task index from 0 to 1048575, got 1048576",
        ),
        ({"ps": {1: "a:1", "1": "b:1"}}, "/job:ps/task:1 is listed twice"),
        (
            {"ps": ["host"]},
            "/job:ps/task:0: address 'host': expected a port from 0 to 65535 at its end",
        ),
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


def test_complete_cluster_suits_every_task() -> None:
    for task_type, task_id in [("chief", 0), ("worker", 2), ("ps", 1), (None, None), (None, 3)]:
        spec = ClusterSpec(FULL)
        assert validate_for_training(spec, task_type, task_id) == (spec, task_type, task_id)


def test_cluster_without_chief_suits_a_program_that_is_no_task() -> None:
    spec = ClusterSpec({"ps": ["p:1"], "worker": ["w:1"]})
    assert validate_for_training(spec, None, None) == (spec, None, None)


def test_worker_and_ps_may_know_only_themselves() -> None:
    for cluster, task_type, task_id in [
        ({"ps": ["p0:1"], "worker": {3: "w3:1"}}, "worker", 3),
        ({"worker": {3: "w3:1"}}, "worker", 3),
        ({"ps": {1: "p1:1"}}, "ps", 1),
    ]:
        spec = ClusterSpec(cluster)
        assert validate_for_training(spec, task_type, task_id) == (spec, task_type, task_id)


def test_index_may_be_left_out_where_the_job_has_one_task() -> None:
    spec = ClusterSpec(FULL)
    assert validate_for_training(spec, "chief", None) == (spec, "chief", 0)


def test_master_is_accepted_for_chief() -> None:
    master = ClusterSpec({"master" if job == "chief" else job: FULL[job] for job in FULL})
    chief = ClusterSpec(FULL)
    assert with_chief(master) == chief
    assert with_chief(chief) is chief
    assert validate_for_training(master, "master", 0) == (chief, "chief", 0)


def test_evaluator_is_left_out_of_the_training_cluster() -> None:
    spec = ClusterSpec({**FULL, "evaluator": ["e:1"]})
    for task_type in ("chief", "evaluator"):
        assert validate_for_training(spec, task_type, 0) == (ClusterSpec(FULL), task_type, 0)


def test_evaluator_need_not_be_listed() -> None:
    spec = ClusterSpec(FULL)
    assert validate_for_training(spec, "evaluator", 0) == (spec, "evaluator", 0)


def test_unfit_cluster_is_an_error_that_names_the_field() -> None:
    for cluster, task_type, task_id, message in [
        ({}, "worker", 0, "cluster is missing or empty"),
        (
            {**FULL, "gpu": []},
            "worker",
            0,
            "cluster.gpu: expected the jobs 'chief', 'worker', 'ps' or 'evaluator', got 'gpu'",
        ),
        (
            {**FULL, "master": ["m:1"]},
            "chief",
            0,
            "cluster: the cluster has both a 'chief' and a 'master', which are the same job",
        ),
        (
            {**FULL, "chief": ["c:1", "d:1"]},
            "chief",
            0,
            "cluster.chief: expected at most one chief, got 2",
        ),
        (
            {**FULL, "evaluator": ["c:2", "d:2"]},
            "chief",
            0,
            "cluster.evaluator: expected at most one evaluator, got 2",
        ),
        ({"worker": ["w:1"]}, None, None, "cluster.ps: expected at least one ps, got none"),
        (
            {"chief": ["c:1"], "ps": ["p:1"], "worker": []},
            "chief",
            0,
            "cluster.worker: expected at least one worker, got none",
        ),
        (
            FULL,
            "foobar",
            0,
            "task.type: expected 'chief', 'worker', 'ps' or 'evaluator', got 'foobar'",
        ),
        (SPARSE, "chief", 0, "task.type is 'chief', but the cluster has only 'ps', 'worker'"),
        (FULL, "ps", 2, "task.index is 2, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", -1, "task.index is -1, and the job 'ps' has tasks 0 to 1"),
        (FULL, "ps", None, "task.index is missing, and the job 'ps' has tasks 0 to 1"),
        (SPARSE, "worker", 0, "task.index is 0, and the job 'worker' has tasks 1, 4"),
        (
            {**FULL, "evaluator": ["e:1"]},
            "evaluator",
            1,
            "task.index is 1, and the job 'evaluator' has only task 0",
        ),
    ]:
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

WITHOUT_CHIEF = {job: FULL[job] for job in ("ps", "worker")}
EVALUATED = {**FULL, "evaluator": ["e:1"]}


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
