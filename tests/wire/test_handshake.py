"""Both sides prove the secret, and nothing of what was said can be changed or said again."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.errors import (
    AuthenticationError,
    ConnectFailed,
    FencedError,
    PsyncError,
    RemoteProtocolError,
    VersionMismatch,
)
from psync.wire.codec import encode, replace
from psync.wire.frames import VERSION
from psync.wire.handshake import ClientHandshake, ServerHandshake, refusal
from psync.wire.messages import Challenge, Hello, Proof, Refused

SECRET = b"a secret of the whole cluster"
OTHER = b"the secret of another cluster"
PS, WORKER = "/job:ps/task:0", "/job:worker/task:1"
CLIENT_NONCE, SERVER_NONCE = bytes(range(32)), bytes(range(32, 64))


def client_with(
    secret: bytes | None = SECRET,
    *,
    expect: str | None = PS,
    nonce: bytes = CLIENT_NONCE,
    lane: str = "control",
) -> ClientHandshake:
    hello = Hello(VERSION, VERSION, WORKER, 3, lane, nonce, secret is not None)
    return ClientHandshake(secret, hello, expect)


def server_with(secret: bytes | None = SECRET, *, nonce: bytes = SERVER_NONCE) -> ServerHandshake:
    challenge = Challenge(VERSION, PS, 5, nonce, secret is not None, b"")
    return ServerHandshake(secret, challenge)


def challenge_of(server: ServerHandshake, hello: Hello) -> Challenge:
    challenge = server.challenge(hello)
    assert isinstance(challenge, Challenge)
    return challenge


@pytest.mark.parametrize("secret", [SECRET, None])
def test_two_that_hold_the_same_secret_agree(secret: bytes | None) -> None:
    client, server = client_with(secret), server_with(secret)
    challenge = challenge_of(server, client.hello)
    assert (challenge.task, challenge.incarnation, challenge.secured) == (PS, 5, secret is not None)
    proof = client.answer(challenge)
    assert server.verify(proof) is None
    assert server.hello == client.hello
    assert len(proof.mac) == len(challenge.mac) == (32 if secret else 0)


@pytest.mark.parametrize("binding", [b"", hashlib.sha256(b"a certificate").digest()])
def test_golden_proofs(binding: bytes) -> None:
    """Recomputed here from the description alone, so that it stays true."""
    client, server = client_with(), server_with()
    client.binding = server.binding = binding
    challenge = challenge_of(server, client.hello)
    unsigned = Challenge(2, PS, 5, SERVER_NONCE, True, b"")
    transcript = b""
    for message in (Hello(2, 2, WORKER, 3, "control", CLIENT_NONCE, True), unsigned):
        header = encode(message)
        transcript += len(header).to_bytes(4, "little") + header

    def mac(label: bytes) -> bytes:
        key = hmac.new(SECRET, b"psync/1 key " + label, "sha256").digest()
        text = b"psync/1 " + label + hashlib.sha256(transcript + binding).digest()
        return hmac.new(key, text, "sha256").digest()

    assert challenge.mac == mac(b"server")
    assert client.answer(challenge).mac == mac(b"client")


@pytest.mark.promise("security.secret-stays")
def test_the_secret_shows_in_nothing_that_is_sent() -> None:
    client, server = client_with(), server_with()
    challenge = challenge_of(server, client.hello)
    for message in (client.hello, challenge, client.answer(challenge)):
        assert SECRET not in encode(message)


def test_a_client_without_a_secret_is_refused_at_once() -> None:
    answer = server_with().challenge(client_with(None).hello)
    assert answer == Refused("authentication", f"{PS} has a secret, the peer has none")


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (SECRET, None, f"this task has a secret, but {PS} has none"),
        (None, SECRET, f"this task has no secret, but {PS} has one"),
    ],
)
def test_a_client_says_who_lacks_the_secret(
    ours: bytes | None, theirs: bytes | None, told: str
) -> None:
    client = client_with(ours)
    hello = replace(client.hello, secured=theirs is not None)
    with pytest.raises(AuthenticationError) as caught:
        client.answer(challenge_of(server_with(theirs), hello))
    assert caught.value.message == told
    assert caught.value.hint == (
        "give all tasks of the cluster the same PSYNC_SECRET, or start all of them with --insecure"
    )


@pytest.mark.parametrize("seen", [b"", bytes(32)], ids=["none", "another"])
def test_who_sees_another_certificate_than_the_servers_is_not_proved_to(seen: bytes) -> None:
    client, server = client_with(), server_with()
    client.binding, server.binding = seen, hashlib.sha256(b"a certificate").digest()
    with pytest.raises(AuthenticationError) as caught:
        client.answer(challenge_of(server, client.hello))
    assert caught.value.message == f"{PS} does not have the same secret as this task" + (
        ", or somebody between the two ends its TLS" if seen else ""
    )


def test_a_proof_made_for_another_certificate_is_refused() -> None:
    client, server = client_with(), server_with()
    client.binding = bytes(32)
    answered = server_with()
    answered.binding = bytes(32)
    challenge_of(server, client.hello)
    proof = client.answer(challenge_of(answered, client.hello))
    server.binding = hashlib.sha256(b"a certificate").digest()
    assert server.verify(proof) == Refused("authentication", "the proof does not match")


@pytest.mark.promise("security.proofs")
def test_a_proof_cannot_be_replayed() -> None:
    client, server = client_with(), server_with()
    proof = client.answer(challenge_of(server, client.hello))
    again = server_with(nonce=bytes(32))
    challenge_of(again, client.hello)
    assert again.verify(proof) == Refused("authentication", "the proof does not match")


@pytest.mark.promise("security.proofs")
def test_a_proof_cannot_be_reflected() -> None:
    client, server = client_with(), server_with()
    challenge = challenge_of(server, client.hello)
    assert server.verify(Proof(challenge.mac)) is not None
    mirrored = replace(challenge, mac=client.answer(challenge).mac)
    with pytest.raises(AuthenticationError):
        client_with().answer(mirrored)


@pytest.mark.parametrize("mac", [b"", bytes(32), bytes(31), bytes(1000)])
def test_a_guessed_proof_is_refused(mac: bytes) -> None:
    server = server_with()
    challenge = challenge_of(server, client_with().hello)
    assert server.verify(Proof(mac)) is not None
    with pytest.raises(AuthenticationError):
        client_with().answer(replace(challenge, mac=mac))


def other_value(value: object) -> st.SearchStrategy[Any]:
    strategies: dict[type, st.SearchStrategy[Any]] = {
        bool: st.just(not value),
        int: st.integers(0, 2**64 - 1),
        str: st.text(st.characters(categories=["L", "N"]), max_size=20) | st.just("bulk"),
        bytes: st.binary(min_size=32, max_size=32),
    }
    return strategies[type(value)].filter(lambda changed: changed != value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_field_of_the_greeting_can_be_changed_on_the_way(data: st.DataObject) -> None:
    client, server = client_with(), server_with()
    name = data.draw(st.sampled_from(Hello.__struct_fields__))
    changed = data.draw(other_value(getattr(client.hello, name)))
    answer = server.challenge(replace(client.hello, **{name: changed}))
    if isinstance(answer, Challenge):
        with pytest.raises(AuthenticationError):
            client.answer(answer)
        whatever = client_with()
        honest = challenge_of(server_with(), whatever.hello)
        assert server.verify(whatever.answer(honest)) is not None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_field_of_the_challenge_can_be_changed_on_the_way(data: st.DataObject) -> None:
    client, server = client_with(), server_with()
    challenge = challenge_of(server, client.hello)
    name = data.draw(st.sampled_from(Challenge.__struct_fields__))
    changed = data.draw(other_value(getattr(challenge, name)))
    with pytest.raises((AuthenticationError, VersionMismatch)):
        client.answer(replace(challenge, **{name: changed}))


@pytest.mark.promise("security.no-pickle-from-strangers")
@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_only_the_right_proof_passes(mac: bytes) -> None:
    client, server = client_with(), server_with()
    right = client.answer(challenge_of(server, client.hello)).mac
    assert (server.verify(Proof(mac)) is None) is (mac == right)


@pytest.mark.parametrize(
    "changed",
    [
        {"nonce": bytes(31)},
        {"nonce": bytes(33)},
        {"nonce": b""},
        {"lane": "other"},
        {"lane": ""},
        {"task": "x" * 201},
        {"task": "/job:ps/task:0\nforged line of a log"},
        {"task": "\x1b[2J"},
    ],
)
def test_a_malformed_greeting_is_refused(changed: dict[str, Any]) -> None:
    for secret in (SECRET, None):
        hello = replace(client_with(secret).hello, **changed)
        assert server_with(secret).challenge(hello) == Refused("protocol", "malformed greeting")


@pytest.mark.parametrize(
    "changed", [{"nonce": bytes(31)}, {"nonce": b""}, {"task": "x" * 201}, {"task": "a\nb"}]
)
def test_a_malformed_challenge_is_refused(changed: dict[str, Any]) -> None:
    client = client_with(None)
    challenge = challenge_of(server_with(None), client.hello)
    with pytest.raises(RemoteProtocolError, match=r"^malformed challenge$"):
        client.answer(replace(challenge, **changed))


@pytest.mark.parametrize(("oldest", "newest"), [(3, 4), (0, 1), (3, 2)])
def test_a_client_that_does_not_speak_this_version_is_told_so(oldest: int, newest: int) -> None:
    hello = replace(client_with().hello, oldest_version=oldest, newest_version=newest)
    assert server_with().challenge(hello) == Refused(
        "version",
        f"{PS} speaks version 2 of the wire protocol, the peer speaks {oldest} to {newest}",
    )


@pytest.mark.parametrize(("oldest", "newest"), [(2, 2), (0, 2), (2, 9), (0, 9)])
def test_a_range_that_holds_this_version_will_do(oldest: int, newest: int) -> None:
    client = client_with()
    client.hello = replace(client.hello, oldest_version=oldest, newest_version=newest)
    server = server_with()
    assert server.verify(client.answer(challenge_of(server, client.hello))) is None


def test_a_server_that_chose_a_version_of_its_own_is_left() -> None:
    client = client_with()
    challenge = replace(challenge_of(server_with(), client.hello), version=1)
    with pytest.raises(VersionMismatch) as caught:
        client.answer(challenge)
    assert caught.value.message == (
        f"{PS} speaks version 1 of the wire protocol, this task speaks 2"
    )
    assert caught.value.hint == "install the same version of psync for all tasks"


@pytest.mark.parametrize("secret", [SECRET, None])
def test_another_task_than_the_one_expected_is_left(secret: bytes | None) -> None:
    client = client_with(secret, expect="/job:ps/task:1")
    with pytest.raises(RemoteProtocolError) as caught:
        client.answer(challenge_of(server_with(secret), client.hello))
    assert caught.value.message == f"expected /job:ps/task:1 at this address, {PS} answered"
    assert caught.value.hint == "check the addresses of the cluster, in TF_CONFIG for example"


def test_a_client_may_expect_nobody_in_particular() -> None:
    client = client_with(expect=None)
    client.answer(challenge_of(server_with(), client.hello))


@pytest.mark.parametrize(
    ("why", "error", "hint"),
    [
        ("version", VersionMismatch, "install the same version of psync for all tasks"),
        (
            "authentication",
            AuthenticationError,
            "give all tasks of the cluster the same PSYNC_SECRET",
        ),
        (
            "tls",
            AuthenticationError,
            "set PSYNC_TLS_CA_FILE, PSYNC_TLS_CERT_FILE and PSYNC_TLS_KEY_FILE for all tasks, "
            "or none",
        ),
        ("fenced", FencedError, None),
        ("full", ConnectFailed, None),
        ("early", ConnectFailed, None),
        ("protocol", RemoteProtocolError, None),
        ("something new", RemoteProtocolError, None),
    ],
)
def test_a_refusal_becomes_the_error_that_says_who_must_act(
    why: str, error: type[PsyncError], hint: str | None
) -> None:
    raised = refusal(Refused(why, "because of this"), PS)
    assert type(raised) is error
    assert raised.message == f"{PS} refused the connection: because of this"
    assert raised.hint == hint


def test_the_words_of_a_stranger_cannot_forge_a_log() -> None:
    assert refusal(Refused("x", "a\nb"), PS).message == f"{PS} refused the connection: 'a\\nb'"
