"""What the tests of TLS share: certificates of authorities that they choose."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from psync.net import certificates
from psync.net.certificates import Tls, load_tls
from psync.net.signing import Authority

HOSTS = ("localhost", "127.0.0.1", "ps0")
DAY = datetime.timedelta(days=1)


def authority(first_day: float = -1, last_day: float = 1) -> Authority:
    """An authority that is valid between these days, of which 0 is today."""
    now = datetime.datetime.now(datetime.UTC)
    return Authority(now + first_day * DAY, now + last_day * DAY)


def variables_of(
    directory: Path,
    signer: Authority,
    hosts: Sequence[str] = HOSTS,
    trusts: Authority | None = None,
) -> dict[str, str]:
    """Write files into a new directory: a certificate of ``signer``, and trust in ``trusts``."""
    pems = (trusts or signer).certificate, *signer.issue(hosts)
    made = dict(zip(certificates.FILES, pems, strict=True))
    return certificates.write(made, directory)


def tls_of(
    directory: Path,
    signer: Authority,
    hosts: Sequence[str] = HOSTS,
    trusts: Authority | None = None,
    *,
    mutual: bool = True,
) -> Tls:
    """TLS of a task with a certificate of ``signer``, which trusts those of ``trusts``."""
    environ = variables_of(directory, signer, hosts, trusts)
    tls = load_tls({**environ, "PSYNC_TLS_MUTUAL": "1" if mutual else "0"})
    assert tls is not None
    return tls


def without_certificate(environ: dict[str, str]) -> Tls:
    """TLS of a task that trusts the same authority, and can show nothing."""
    bare = load_tls({"PSYNC_TLS_CA_FILE": environ["PSYNC_TLS_CA_FILE"], "PSYNC_TLS_MUTUAL": "0"})
    assert bare is not None
    return bare
