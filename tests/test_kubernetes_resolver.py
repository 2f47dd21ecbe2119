from __future__ import annotations

import contextlib
import json
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
from psync.kubernetes_resolver import ExecutableLocation, KubernetesClusterResolver

SELECTORS = {"ps": ["job-name=ps"], "worker": ["job-name=worker", "job-name=spot"]}


def pod(name: str, host_ip: str | None, phase: str = "Running", pod_ip: str = "") -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        status=SimpleNamespace(phase=phase, host_ip=host_ip, pod_ip=pod_ip),
    )


class Pods:
    """Answers as ``kubernetes.client.CoreV1Api`` does."""

    def __init__(self, **pods: list[Any]) -> None:
        self.pods = pods  # by the value of the label "job-name"

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
        key, _, value = label_selector.partition("=")
        assert key == "job-name"
        return SimpleNamespace(items=self.pods.get(value, []))


def test_tasks_are_the_pods_of_a_job_in_the_order_of_selectors_and_names() -> None:
    pods = Pods(
        ps=[pod("ps-1", "10.0.0.2"), pod("ps-0", "10.0.0.1")],
        worker=[pod("w", "10.0.0.3")],
        spot=[pod("a", "10.0.0.4")],
    )
    resolver = KubernetesClusterResolver(SELECTORS, override_client=pods)
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["10.0.0.1:8470", "10.0.0.2:8470"], "worker": ["10.0.0.3:8470", "10.0.0.4:8470"]}
    )


def test_it_asks_again_each_time() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1")])
    resolver = KubernetesClusterResolver(tf_server_port=5, override_client=pods)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:5"]}
    pods.pods["tensorflow"].append(pod("b", "10.0.0.2"))
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:5", "10.0.0.2:5"]}


def test_who_this_process_is_is_for_the_program_to_say() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1")])
    resolver = KubernetesClusterResolver(rpc_layer="grpc", override_client=pods)
    assert (resolver.task_type, resolver.task_id, resolver.num_accelerators()) == (None, None, {})
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.0.0.1:8470"


def test_addresses_may_be_of_version_6_and_those_of_the_pods() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1", pod_ip="fd00::7")])
    resolver = KubernetesClusterResolver(override_client=pods, use_pod_ip=True)
    assert resolver.cluster_spec().task_address("worker", 0) == "[fd00::7]:8470"


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_a_pod_that_does_not_run_is_named_with_its_phase(phase: str) -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1"), pod("b", "10.0.0.2", phase)])
    with pytest.raises(ConfigurationError) as caught:
        KubernetesClusterResolver(override_client=pods).cluster_spec()
    assert caught.value.message == (
        f'KubernetesClusterResolver: pod "b" does not run, its phase is "{phase}"'
    )


def test_a_pod_without_an_address_is_named() -> None:
    with pytest.raises(ConfigurationError, match='pod "a" has no address yet'):
        KubernetesClusterResolver(override_client=Pods(tensorflow=[pod("a", None)])).cluster_spec()


def test_two_pods_of_one_host_are_told_apart_by_their_own_addresses() -> None:
    pods = Pods(tensorflow=[pod("a", "10.0.0.1", pod_ip="1::1"), pod("b", "10.0.0.1")])
    with pytest.raises(ConfigurationError, match="have the same address") as caught:
        KubernetesClusterResolver(override_client=pods).cluster_spec()
    assert "use_pod_ip=True" in str(caught.value.hint)


def test_a_client_that_fails_is_told_as_a_failed_connection() -> None:
    class Refused:
        def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
            raise OSError("403 Forbidden")

    with pytest.raises(ConnectFailed, match=r"'job-name=tensorflow' could not .*: 403") as caught:
        KubernetesClusterResolver(override_client=Refused()).cluster_spec()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("location", ["cloud", None, 3])
def test_a_location_that_is_none_is_an_error(location: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected one of \['within_cluster', 'off_cl"):
        KubernetesClusterResolver(executable_location=location, override_client=Pods())


@pytest.mark.parametrize("selectors", ["job-name=ps", [3]])
def test_selectors_are_a_list_of_text(selectors: Any) -> None:
    with pytest.raises(ConfigurationError, match="job 'ps': expected a list of label selectors"):
        KubernetesClusterResolver({"ps": selectors}, override_client=Pods())


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match=r"hint: pip install 'psync\[kubernetes\]'"):
        KubernetesClusterResolver()


# --- the real client, against a server on this machine -----------------------------------------


@contextlib.contextmanager
def api(answers: dict[str, Any]) -> Iterator[str]:
    """Serve lists of pods by label selector; yield the server's URL."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            selector = parse_qs(url.query)["labelSelector"][0]
            found = url.path == "/api/v1/pods" and selector in answers
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
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
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
        with pytest.raises(ConnectFailed, match=r"'job-name=other' could not be listed: \(403\)"):
            other.cluster_spec()
        other._client.api_client.rest_client.pool_manager.clear()  # type: ignore[attr-defined]
        resolver._client.api_client.rest_client.pool_manager.clear()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("default")
def test_outside_of_a_pod_there_is_no_account_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match=r"within_cluster: Service host/port") as caught:
        KubernetesClusterResolver()
    assert caught.value.hint == "outside of a pod: executable_location='off_cluster'"
