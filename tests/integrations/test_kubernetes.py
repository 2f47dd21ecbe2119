"""Pods of Kubernetes: found by the names that the DNS has of them, or by labels from the API."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from psync.cluster import ClusterSpec
from psync.errors import ConfigurationError, ConnectFailed
from psync.integrations import kubernetes
from psync.integrations.kubernetes import ExecutableLocation, KubernetesClusterResolver
from psync.net.resolvers import training_cluster

JOBS = {"chief": 1, "ps": 12, "worker": 2}


def named(host: str = "train-chief-0", **options: Any) -> KubernetesClusterResolver:
    """A resolver of the StatefulSets train-chief, train-ps and train-worker, in one of the pods."""
    options = {"jobs": JOBS, "service": "train", **options}
    return KubernetesClusterResolver(environ={"HOSTNAME": host}, **options)


# --- by name ---------------------------------------------------------------------------------


def test_tasks_are_at_the_names_that_a_headless_service_gives_their_pods() -> None:
    spec = named().cluster_spec()
    assert spec.job_tasks("chief") == ["train-chief-0.train:8470"]
    assert spec.job_tasks("ps") == [f"train-ps-{n}.train:8470" for n in range(12)]
    assert spec.job_tasks("worker") == ["train-worker-0.train:8470", "train-worker-1.train:8470"]


def test_a_pods_own_name_says_which_task_it_is() -> None:
    for host, task in [
        ("train-chief-0", ("chief", 0)),
        ("train-ps-10", ("ps", 10)),
        ("train-worker-1", ("worker", 1)),
        ("train-worker-1.train.ml.svc.cluster.local", ("worker", 1)),
    ]:
        resolver = named(host, rpc_layer="grpc")
        assert (resolver.task_type, resolver.task_id) == task
        assert resolver.master() == f"grpc://{host.partition('.')[0]}.train:8470"
        assert training_cluster(resolver) == (resolver.cluster_spec(), *task)


@pytest.mark.parametrize(
    "host", ["train-ps-12", "train-worker", "other-ps-1", "node7", "train-ps-x"]
)
def test_a_pod_with_another_name_does_not_pass_for_the_program(host: str) -> None:
    resolver = named(host)
    with pytest.raises(ConfigurationError) as caught:
        training_cluster(resolver)
    assert caught.value.message == (
        f'KubernetesClusterResolver: this pod is called "{host}", but the tasks are '
        "train-chief-[0…0], train-ps-[0…11], train-worker-[0…1]"
    )
    resolver.task_type, resolver.task_id = "worker", 1
    assert training_cluster(resolver)[1:] == ("worker", 1)


def test_a_jobset_names_its_jobs_in_its_own_way() -> None:
    resolver = named(
        "train-worker-0-1",
        jobs={"ps": 1, "worker": 2},
        names={"ps": "train-ps-0", "worker": "train-worker-0"},
        namespace="ml",
        tf_server_port=5,
    )
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["train-ps-0-0.train.ml.svc:5"],
        "worker": ["train-worker-0-0.train.ml.svc:5", "train-worker-0-1.train.ml.svc:5"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_what_is_missing_or_wrong_is_named() -> None:
    for options, told in [
        ({"jobs": None}, "jobs is missing"),
        ({"service": None}, "service is missing"),
        ({"jobs": {"ps": 0}}, "jobs: 'ps': expected the number of its tasks, got 0"),
        ({"jobs": {"ps": True}}, "jobs: 'ps': expected the number of its tasks, got True"),
        ({"names": {"pss": "x"}}, "names: 'pss' is not one of jobs"),
        ({"service": "a.b"}, "expected a name of lower-case letters, digits and dashes, got 'a.b'"),
        (
            {"job_to_label_mapping": {"ps": ["a=b"]}},
            "service and names find pods",
        ),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            named(**options)
        assert caught.value.message.startswith(f"KubernetesClusterResolver: {told}")


# --- by labels -------------------------------------------------------------------------------

SELECTORS = {"ps": ["job-name=ps"], "worker": ["job-name=worker", "job-name=spot"]}


def pod(name: str, pod_ip: str | None, phase: str = "Running", **more: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name, deletion_timestamp=more.get("deleted")),
        status=SimpleNamespace(phase=phase, host_ip=more.get("host_ip"), pod_ip=pod_ip),
    )


class Pods:
    """Answers as ``kubernetes.client.CoreV1Api`` does."""

    def __init__(self, **pods: list[Any]) -> None:
        self.pods = pods  # by the value of the label "job-name"
        self.later: list[dict[str, list[Any]]] = []  # what there is after each further question
        self.namespaces: set[str] = set()

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any:
        self.namespaces.add(namespace)
        key, _, value = label_selector.partition("=")
        assert key == "job-name"
        found = SimpleNamespace(items=self.pods.get(value, []))
        if self.later:
            self.pods = self.later.pop(0)
        return found


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "POLL_S", 0.0)
    monkeypatch.setattr(kubernetes, "REPORT_EVERY_S", 0.0)


def test_tasks_are_the_pods_of_a_job_in_the_order_of_selectors_and_names() -> None:
    pods = Pods(
        ps=[pod("ps-10", "10.0.0.2"), pod("ps-2", "10.0.0.1")],
        worker=[pod("w-1-9zzzz", "10.0.0.3"), pod("w-10-1aaaa", "10.0.0.5")],
        spot=[pod("a", "10.0.0.4")],
    )
    resolver = KubernetesClusterResolver(SELECTORS, override_client=pods)
    assert resolver.cluster_spec() == ClusterSpec(
        {
            "ps": ["10.0.0.1:8470", "10.0.0.2:8470"],
            "worker": ["10.0.0.3:8470", "10.0.0.5:8470", "10.0.0.4:8470"],
        }
    )


def test_it_asks_again_each_time_in_one_namespace() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1")])
    resolver = KubernetesClusterResolver(tf_server_port=5, override_client=pods, namespace="ml")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:5"]}
    pods.pods["tensorflow"].append(pod("b", "10.0.0.2"))
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:5", "10.0.0.2:5"]}
    assert pods.namespaces == {"ml"}


def test_the_task_of_this_process_is_that_of_its_pod() -> None:
    for host, task in [
        ("ps-2", ("ps", 1)),
        ("w-1", ("worker", 0)),  # of an indexed Job, whose pods have a suffix
        ("a", ("worker", 1)),
        ("laptop", (None, None)),
    ]:
        pods = Pods(
            ps=[pod("ps-1", "10.0.0.1"), pod("ps-2", "10.0.0.2")],
            worker=[pod("w-1-9zzzz", "10.0.0.3")],
            spot=[pod("a", "10.0.0.4")],
        )
        resolver = KubernetesClusterResolver(
            SELECTORS, override_client=pods, environ={"HOSTNAME": host}
        )
        assert (resolver.task_type, resolver.task_id, resolver.num_accelerators()) == (*task, {})
        resolver.task_type, resolver.task_id = "worker", 0
        assert resolver.master(rpc_layer="grpc") == "grpc://10.0.0.3:8470"


def test_addresses_are_those_of_the_pods_unless_hosts_are_asked_for() -> None:
    pods = Pods(tensorflow=[pod("a", "fd00::7", host_ip="10.0.0.1")])
    by_pod = KubernetesClusterResolver(override_client=pods)
    assert by_pod.cluster_spec().task_address("worker", 0) == "[fd00::7]:8470"
    by_host = KubernetesClusterResolver(override_client=pods, use_pod_ip=False)
    assert by_host.cluster_spec().task_address("worker", 0) == "10.0.0.1:8470"


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ([pod("b", "10.0.0.2", "Pending")], 'pod "b" is Pending'),
        ([pod("b", "10.0.0.2", "Unknown")], 'pod "b" is Unknown'),
        ([pod("b", None)], 'pod "b" has no address yet'),
        ([], "no pod with 'job-name=tensorflow' runs in namespace 'default'"),
        ([pod("b", "10.0.0.2", "Succeeded")], "no pod with 'job-name=tensorflow' runs in "),
    ],
)
@pytest.mark.usefixtures("no_pauses")
def test_pods_that_do_not_run_yet_are_waited_for_by_name(
    before: list[Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    pods = Pods(tensorflow=before)
    pods.later = [{"tensorflow": before}, {"tensorflow": [pod("b", "10.0.0.2")]}]
    resolver = KubernetesClusterResolver(override_client=pods, namespace="default")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470"]}
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines
    assert lines[0].startswith(f"KubernetesClusterResolver has been waiting for 0 s: {told}")


def test_pods_that_have_ended_or_are_ending_are_passed_over() -> None:
    pods = Pods(
        tensorflow=[
            pod("w-0-aaaaa", "10.0.0.1", "Failed"),
            pod("w-0-bbbbb", "10.0.0.2"),
            pod("w-0-ccccc", "10.0.0.3", deleted="2026-11-22T00:00:00Z"),
        ]
    )
    resolver = KubernetesClusterResolver(override_client=pods)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470"]}


def test_waiting_for_pods_ends_and_says_for_which() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1"), pod("b", None, "Pending")])
    resolver = KubernetesClusterResolver(
        override_client=pods, jobs={"worker": 2}, timeout_s=0, namespace="ml"
    )
    with pytest.raises(ConnectFailed) as caught:
        resolver.cluster_spec()
    assert caught.value.message == (
        'KubernetesClusterResolver: not all pods run after 0 s: pod "b" is Pending; '
        "1 of 2 pods of job 'worker' run"
    )
    assert caught.value.hint == "kubectl describe pods --namespace ml"


def test_a_client_that_fails_is_told_as_a_failed_connection() -> None:
    class Refused:
        def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any:
            raise OSError("403 Forbidden")

    with pytest.raises(
        ConnectFailed, match=r"'job-name=tensorflow' in .* not be .*: 403"
    ) as caught:
        KubernetesClusterResolver(override_client=Refused()).cluster_spec()
    assert isinstance(caught.value.__cause__, OSError)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match=r"hint: pip install 'psync\[kubernetes\]'"):
        KubernetesClusterResolver({"ps": ["job-name=ps"]})


# --- the real client, against a server on this machine -----------------------------------------


@contextlib.contextmanager
def api(answers: dict[str, Any]) -> Iterator[str]:
    """Serve lists of pods by label selector; yield the server's URL."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            selector = parse_qs(url.query)["labelSelector"][0]
            found = url.path == "/api/v1/namespaces/ml/pods" and selector in answers
            body = json.dumps({"kind": "PodList", "items": answers.get(selector)}).encode()
            self.send_response(200 if found else 403)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def listed(name: str, phase: str = "Running", **status: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def kubeconfig(folder: Path, url: str) -> str:
    context = {"cluster": "here", "user": "me", "namespace": "ml"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "contexts": [{"name": "here", "context": context}],
        "users": [{"name": "me", "user": {}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))  # YAML, too
    return str(path)


@pytest.mark.filterwarnings("default")  # those of a library that is not ours
def test_the_kubernetes_client_lists_the_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = pytest.importorskip("kubernetes.config")
    items = [
        listed("ps-1", hostIP="10.0.0.2", podIP="fd00::2"),
        listed("ps-0", hostIP="10.0.0.1", podIP="fd00::1"),
    ]
    with api({"job-name=ps": items}) as url:
        path = kubeconfig(tmp_path, url)
        monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", path)
        for use_pod_ip, addresses in (
            (False, ["10.0.0.1:8470", "10.0.0.2:8470"]),
            (True, ["[fd00::1]:8470", "[fd00::2]:8470"]),
        ):
            resolver = KubernetesClusterResolver(
                {"ps": ["job-name=ps"]},
                executable_location=ExecutableLocation.OFF_CLUSTER,
                use_pod_ip=use_pod_ip,
            )
            assert resolver.cluster_spec().as_dict() == {"ps": addresses}
        other = KubernetesClusterResolver(
            {"ps": ["job-name=other"]}, executable_location="off_cluster"
        )
        with pytest.raises(ConnectFailed, match=r"'job-name=other' in namespace 'ml' .*: \(403\)"):
            other.cluster_spec()
        for each in (other, resolver):
            each._found._client.api_client.rest_client.pool_manager.clear()  # type: ignore[union-attr]
