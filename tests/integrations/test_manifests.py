"""What psync launch prints: manifests and a batch script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psync.cli.main import main
from psync.integrations.batch_scripts import Batch, script
from psync.integrations.manifests import Launch, manifests, pod_template
from psync.integrations.yaml_text import dump
from psync.net.resolvers import resolve_cluster

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.31", "1.34", "1.37")
"""Of Kubernetes: podReplacementPolicy and podFailurePolicy are there in all that are kept up."""

EVERYTHING = Launch(
    "train", "registry.example.org/train:1", ("python", "train.py", "--epochs", "10"), 2, 4,
    namespace="team", spot_workers=True, shared_volume=True, tls=True,
    resources={"worker": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
)  # fmt: skip
PLAIN = Launch("train", "train:1", ("python", "train.py"), 1, 1, volume=None)
SECRETS = {"secret": "0" * 64, "ca.pem": "-----BEGIN\n\nMII=\n-----END\n", "odd": "no\ttab: #"}


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return str(path)


@pytest.mark.parametrize("launch", [EVERYTHING, PLAIN], ids=["everything", "plain"])
def test_what_is_printed_is_what_was_meant(launch: Launch) -> None:
    yaml = pytest.importorskip("yaml")
    documents = manifests(launch, SECRETS)
    assert list(yaml.safe_load_all(dump(documents))) == [data for _, data in documents]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("launch", [EVERYTHING, PLAIN], ids=["everything", "plain"])
def test_each_object_is_as_kubernetes_publishes_it(launch: Launch, version: str) -> None:
    yaml = pytest.importorskip("yaml")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for data in yaml.safe_load_all(dump(manifests(launch, SECRETS))):
        kubernetes_validate.validate(data, version, strict=True)


def test_the_batch_script_has_nothing_for_shellcheck_to_say(tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(script(Batch("train", ("python", "train.py", "a b"), 2, 4, 8, "1:00:00")))
    run = subprocess.run(
        [tool("shellcheck"), str(file)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_dockerfile_has_nothing_for_hadolint_to_say() -> None:
    run = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_image_is_built_of_what_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    names = [name for line in copied for name in line.split()]
    assert names
    assert [name for name in names if f"!{name}\n" not in ignored] == []
    assert [name for name in names if not (ROOT / name).exists()] == []


KUBERNETES = ["launch", "kubernetes", "--image", "train:1"]


def test_manifests_have_a_secret_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert main([*KUBERNETES, "--ps", "2", "--", "my_dir/Train_It.py", "--epochs", "3"]) == 0
        out = capsys.readouterr().out
        assert "name: train-it-chief\n" in out
        words = ("python", "my_dir/Train_It.py", '"--epochs"', '"3"')
        command = "          args:\n" + "".join(f"            - {word}\n" for word in words)
        assert out.count(command) == 2
        found += re.findall(r"  secret: (\S+)\n", out)
    assert len(set(found)) == 2


def test_certificates_are_for_the_pods(capsys: pytest.CaptureFixture[str]) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    assert main([*KUBERNETES, "--tls", "--workers", "2", "--name", "run", "--", "train.py"]) == 0
    pem = re.search(r"  cert.pem: \|\n((?:    .*\n)+)", capsys.readouterr().out)
    assert pem is not None
    certificate = x509.load_pem_x509_certificate(re.sub("(?m)^    ", "", pem[1]).encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    pods = ("chief-0", "ps-0", "worker-0", "worker-1")
    assert names.get_values_for_type(x509.DNSName) == [f"run-{pod}.run" for pod in pods]


def test_the_batch_script_names_the_job_and_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "slurm", "--ps", "2", "--workers", "4", "--sbatch=--partition=gpu"]
    assert main([*arguments, "--", "train.py", "--note", "it's"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --job-name=train\n#SBATCH --ntasks=7\n" in out
    assert "#SBATCH --partition=gpu\n" in out
    assert "python train.py --note 'it'\"'\"'s' &\n" in out


def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in [
        (["kubernetes", "--", "train.py"], "Missing option '--image'"),
        ([*KUBERNETES[1:], "--"], "Missing argument"),
        ([*KUBERNETES[1:], "--name", "Train", "--", "train.py"], "--name: expected at most 40"),
        ([*KUBERNETES[1:], "--", "1.py"], "--name: expected at most 40 lower-case letters"),
        ([*KUBERNETES[1:], "--namespace", "a_b", "--", "train.py"], "--namespace: expected"),
        (
            [*KUBERNETES[1:], "--resources", "server:cpu=1", "--", "train.py"],
            "--resources: expected one of chief, ps, worker and amounts",
        ),
        ([*KUBERNETES[1:], "--resources", "ps:cpu", "--", "train.py"], "--resources: expected"),
        (
            [*KUBERNETES[1:], "--volume", "none", "--shared-volume", "--", "train.py"],
            "--shared-volume needs a volume",
        ),
        (["slurm", "--sbatch", "gpu", "--", "train.py"], "--sbatch: expected an option of sbatch"),
        (["slurm", "--setup", "a\nb", "--", "train.py"], "expected one line"),
    ]:
        assert main(["launch", *arguments]) == 2
        printed = capsys.readouterr()
        assert told in printed.err
        assert printed.out == ""


GOLDEN = Path(__file__).parent / "manifests"
SECRET = {"secret": "0123456789abcdef" * 4}
CERTIFICATES = {name: f"-----{name}-----\n" for name in ("ca.pem", "cert.pem", "key.pem")}

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "spot": {
        "spot_workers": True,
        "namespace": "team",
        "shared_volume": True,
        "resources": {"worker": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}},
    },
    "tls": {"tls": True, "volume": None, "num_ps": 1},
}


def launch(**options: Any) -> Launch:
    return Launch(
        **{
            "name": "train",
            "image": "registry.example.org/train:1",
            "command": ("python", "train.py", "--epochs", "10"),
            "num_ps": 2,
            "num_workers": 4,
            **options,
        }
    )


def objects(asked: Launch, secrets: dict[str, str] | None = SECRET) -> dict[str, dict[str, Any]]:
    return {
        f"{data['kind']} {data['metadata']['name']}": data for _, data in manifests(asked, secrets)
    }


def test_manifests_are_as_they_were() -> None:
    for name in ASKED:
        secrets = {**SECRET, **(CERTIFICATES if name == "tls" else {})}
        text = dump(manifests(launch(**ASKED[name]), secrets))
        golden = GOLDEN / f"{name}.yaml"
        if os.environ.get("PSYNC_REWRITE"):
            golden.write_text(text)
        assert golden.read_text() == text, f"read the diff; then PSYNC_REWRITE=1: {golden}"


def test_a_pod_finds_its_task_and_the_names_are_those_of_pods() -> None:
    for owner, pod, task in [
        ("StatefulSet train-ps", "train-ps-1", ("ps", 1)),
        ("Job train-worker", "train-worker-3", ("worker", 3)),
        ("Job train-chief", "train-chief-0", ("chief", 0)),
    ]:
        asked = launch()
        (container,) = objects(asked)[owner]["spec"]["template"]["spec"]["containers"]
        environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        resolver = resolve_cluster({**environ, "HOSTNAME": pod})
        assert (resolver.task_type, resolver.task_id) == task
        spec = resolver.cluster_spec()
        addresses = [spec.task_address(job, i) for job in spec.jobs for i in spec.task_indices(job)]
        assert sorted(addresses) == sorted(f"{host}:8470" for host in asked.hosts)


def test_a_secret_that_is_there_is_not_printed() -> None:
    named = objects(launch(secret="mine"), None)
    assert not any(name.startswith("Secret") for name in named)
    (container,) = named["Job train-chief"]["spec"]["template"]["spec"]["containers"]
    sources = [each["valueFrom"] for each in container["env"] if "valueFrom" in each]
    assert sources == [{"secretKeyRef": {"name": "mine", "key": "secret"}}]


def test_the_secret_is_in_its_secret_alone() -> None:
    documents = manifests(launch(), SECRET)
    holders = [data["kind"] for _, data in documents if SECRET["secret"] in str(data)]
    assert holders == ["Secret"]


JOBS = ("chief", "ps", "worker")


def spec(job: str, **options: Any) -> dict[str, Any]:
    asked = Launch("train", "train:1", ("python", "train.py"), 2, 4, **options)
    found: dict[str, Any] = pod_template(asked, job)["spec"]
    return found


def test_pods_may_nothing_that_the_restricted_standard_forbids() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    for job in JOBS:
        pod = spec(job, tls=True)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod["initContainers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
        assert pod["automountServiceAccountToken"] is False
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"secret", "emptyDir", "persistentVolumeClaim"}


GOLDEN_BATCH = Path(__file__).parent / "manifests" / "train.sbatch"

BATCH = Batch(
    "train",
    ("python", "train.py", "--note", "two words"),
    num_ps=2,
    num_workers=4,
    cpus_per_task=8,
    time="12:00:00",
    options=("--partition=gpu",),
    setup=("module load python",),
)


def test_the_script_is_as_it_was() -> None:
    text = script(BATCH)
    if os.environ.get("PSYNC_REWRITE"):
        GOLDEN_BATCH.write_text(text)
    assert GOLDEN_BATCH.read_text() == text, f"read the diff; then PSYNC_REWRITE=1: {GOLDEN_BATCH}"


def test_the_secret_is_on_no_command_line() -> None:
    (srun,) = [line for line in script(BATCH).splitlines() if line.startswith("srun")]
    assert "SECRET" not in srun


def test_what_may_be_read_as_something_else_is_quoted() -> None:
    for value, written in [
        ("None", "None"),
        ("no", '"no"'),
        ("True", '"True"'),
        ("8470", '"8470"'),
        ("1e3", '"1e3"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("- a", '"- a"'),
        ("ä", '"ä"'),
        ('say "x"', '"say \\"x\\""'),
        (True, "true"),
        (7, "7"),
        ([], "[]"),
    ]:
        assert dump([("", {"key": value})]) == f"---\nkey: {written}\n"


def test_text_that_lines_of_its_own_would_change_is_quoted() -> None:
    for text in [
        "  indented\nnot\n", "\n  indented\nnot", "\tindented\nnot", " \nnot", "end\n\n", "end\n  ",
        "\n", "\n\n", "a\r\nb\r\n", "a\nb\0c",
    ]:  # fmt: skip
        assert dump([("", {"key": text})]) == f"---\nkey: {json.dumps(text)}\n"
