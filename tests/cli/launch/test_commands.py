"""`psync launch …` on the command line."""

from __future__ import annotations

import re

import pytest

from psync.cli.main import main

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


def test_a_command_that_is_no_script_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KUBERNETES, "--name", "run", "--", "python3.12", "-m", "train"]) == 0
    words = '            - python3.12\n            - "-m"\n            - train\n'
    assert words in capsys.readouterr().out


def test_the_batch_script_names_the_job_and_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "slurm", "--ps", "2", "--workers", "4", "--sbatch=--partition=gpu"]
    assert main([*arguments, "--", "train.py", "--note", "it's"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --job-name=train\n#SBATCH --ntasks=7\n" in out
    assert "#SBATCH --partition=gpu\n" in out
    assert "python train.py --note 'it'\"'\"'s' &\n" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
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
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.out == ""
