"""Kubernetes as far as psync sees it: pods of manifests as processes, with their names.

A pod is a process in a network of its own: its command, its environment (Secrets and all), and a
name in the DNS that leads to another address each time it is made. The controllers do what
Kubernetes documents: a StatefulSet makes each pod again; a Job does unless it ended with 0, and
looks into its podFailurePolicy first.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from namespaces import Network
from tasks_by_hand import plain_environ


class PlayedKubernetes:
    """Runs manifests.

    Args:
        network: Of the pods.
        documents: The manifests.

    Attributes:
        lines: What pods have printed, with their names, in this order.
        ended: (pod, exit code) of each process that has ended.
        failures: Of jobs, those that count.
        failed: Jobs that have failed.
    """

    def __init__(self, network: Network, documents: list[dict[str, Any]]) -> None:
        self._network = network
        kinds = {kind: [each for each in documents if each["kind"] == kind] for kind in (
            "Secret", "Service", "StatefulSet", "Job")}  # fmt: skip
        self._secrets = {each["metadata"]["name"]: each["stringData"] for each in kinds["Secret"]}
        (self._service,) = [each["metadata"]["name"] for each in kinds["Service"]]
        self._owners: dict[str, dict[str, Any]] = {}
        for owner in (*kinds["StatefulSet"], *kinds["Job"]):
            count = owner["spec"].get("replicas") or owner["spec"]["completions"]
            for index in range(count):
                self._owners[f"{owner['metadata']['name']}-{index}"] = owner
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._disrupted: set[str] = set()
        self._events: queue.Queue[tuple[str, str | int]] = queue.Queue()
        self._followers: list[threading.Thread] = []
        self.lines: list[str] = []
        self._looked_at = 0  # so many of them
        self.ended: list[tuple[str, int]] = []
        self.failures: list[tuple[str, int]] = []
        self.failed: list[str] = []
        self.succeeded: set[str] = set()

    def apply(self) -> None:
        """Start all pods."""
        for pod in self._owners:
            self._start(pod)

    def wait_for(self, text: str) -> str:
        """Do what controllers do, until a line has ``text``; return it. Each line counts once."""
        while True:
            while self._looked_at < len(self.lines):
                self._looked_at += 1
                if text in (line := self.lines[self._looked_at - 1]):
                    return line
            self._step()

    def wait_until_succeeded(self, job: str) -> None:
        """Do what controllers do, until all pods of a job have succeeded."""
        pods = {pod for pod, owner in self._owners.items() if owner["metadata"]["name"] == job}
        while not pods <= self.succeeded:
            self._step()

    def evict(self, pod: str) -> int:
        """Take a pod's machine away: SIGTERM, and SIGKILL when its grace is over.

        Returns:
            The exit code; by then it is made again, if it is.
        """
        self._disrupted.add(pod)
        process = self._processes[pod]
        process.send_signal(signal.SIGTERM)
        grace = self._owners[pod]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        timer = threading.Timer(grace, process.kill)
        timer.start()
        try:
            return self._wait_for_end(pod)
        finally:
            timer.cancel()

    def kill(self, pod: str) -> None:
        """Lose a pod without a word; it is made again, if it is, before this returns."""
        self._processes[pod].kill()
        self._wait_for_end(pod)

    def probe(self, pod: str, kind: str) -> tuple[int, str]:
        """Ask as the kubelet does; return the exit code and what was printed."""
        (container,) = self._spec(pod)["containers"]
        command = container[kind]["exec"]["command"]
        return self._network.call(command, self._environ(pod, container))

    def wait_until_ready(self, pod: str, kind: str = "readinessProbe") -> str:
        """Probe until it succeeds; return what it printed."""
        for _ in range(60):
            code, out = self.probe(pod, kind)
            if code == 0:
                return out
            assert code == 1, out
        raise AssertionError(f"{pod} does not become ready: {out}")

    def stop(self) -> None:
        """Delete everything."""
        for process in self._processes.values():
            process.kill()
        for follower in self._followers:
            follower.join()

    # Inside.

    def _wait_for_end(self, awaited: str) -> int:
        while True:
            pod, event = self._step()
            if isinstance(event, int) and pod == awaited:
                return event

    def _spec(self, pod: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._owners[pod]["spec"]["template"]["spec"]
        return spec

    def _start(self, pod: str) -> None:
        spec = self._spec(pod)
        owner = self._owners[pod]
        domain = spec.get("subdomain") or owner["spec"]["serviceName"]
        assert domain == self._service
        self._network.name(f"{pod}.{domain}", pod)
        self._mount(pod)
        for container in spec.get("initContainers", ()):
            code, out = self._network.call(container["command"], self._environ(pod, container))
            assert code == 0, out
        (container,) = spec["containers"]
        words = [word.replace("$$(", "$(") for word in container["args"]]
        process = self._network.start(words, self._environ(pod, container))
        self._processes[pod] = process
        follower = threading.Thread(target=self._follow, args=(pod, process), daemon=True)
        follower.start()
        self._followers.append(follower)

    def _mount(self, pod: str) -> None:
        """Mount volumes of Secrets, and empty ones, in the file system that pods share here."""
        spec = self._spec(pod)
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        places = {
            mount["name"]: Path(mount["mountPath"])
            for container in (*spec.get("initContainers", ()), *spec["containers"])
            for mount in container.get("volumeMounts", ())
        }
        for name, volume in volumes.items():
            if "secret" in volume:
                secret = self._secrets[volume["secret"]["secretName"]]
                for item in volume["secret"]["items"]:
                    place = places[name] / item["path"]
                    self._write(place, secret[item["key"]])
            elif "emptyDir" in volume:
                self._network.call(["mkdir", "-p", str(places[name])], os.environ)

    def _write(self, place: Path, text: str) -> None:
        write = 'mkdir -p "$(dirname "$1")"; printf %s "$2" > "$1"'
        code, out = self._network.call(["sh", "-c", write, "sh", str(place), text], os.environ)
        assert code == 0, out

    def _environ(self, pod: str, container: dict[str, Any]) -> dict[str, str]:
        environ = plain_environ(HOSTNAME=pod, KUBERNETES_SERVICE_HOST="10.96.0.1")
        environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environ["PATH"]])
        if self._owners[pod]["kind"] == "Job":
            environ["JOB_COMPLETION_INDEX"] = pod.rpartition("-")[2]
        for variable in container.get("env", ()):
            if "value" in variable:
                environ[variable["name"]] = variable["value"]
            else:
                source = variable["valueFrom"]["secretKeyRef"]
                environ[variable["name"]] = self._secrets[source["name"]][source["key"]]
        return environ

    def _follow(self, pod: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._events.put((pod, line.rstrip("\n")))
        self._events.put((pod, process.wait()))

    def _step(self) -> tuple[str, str | int]:
        """Wait for a line, or an exit code, and do what controllers do."""
        try:
            pod, event = self._events.get(timeout=60)
        except queue.Empty:
            raise AssertionError("nothing happens any more:\n" + "\n".join(self.lines)) from None
        if isinstance(event, str):
            self.lines.append(f"{pod}: {event}")
        else:
            self.ended.append((pod, event))
            self.lines.append(f"{pod} ended with {event}")
            self._control(pod, event)
        assert not self.failed, "\n".join(self.lines)
        return pod, event

    def _control(self, pod: str, code: int) -> None:
        owner = self._owners[pod]
        disrupted = pod in self._disrupted
        self._disrupted.discard(pod)
        if owner["kind"] == "Job":
            if code == 0:
                self.succeeded.add(pod)
                return
            job = owner["metadata"]["name"]
            action = _action(owner["spec"]["podFailurePolicy"]["rules"], code, disrupted)
            if action == "Count":
                self.failures.append((pod, code))
            jobs = [self._owners[each]["metadata"]["name"] for each, _ in self.failures]
            counted = jobs.count(job)
            if action == "FailJob" or counted > owner["spec"]["backoffLimit"]:
                self.failed.append(job)
                return
        self._start(pod)


_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def _action(rules: list[dict[str, Any]], code: int, disrupted: bool) -> str:
    """Return what the first rule that matches says; without any, the failure counts."""
    shown = code if code >= 0 else 128 - code
    for rule in rules:
        if codes := rule.get("onExitCodes"):
            assert codes["operator"] == "In"
            if shown in codes["values"]:
                return str(rule["action"])
        elif disrupted and _DISRUPTED in rule["onPodConditions"]:
            return str(rule["action"])
    return "Count"
