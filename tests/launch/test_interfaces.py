"""Which of this machine's addresses others reach."""

from __future__ import annotations

import sys

import pytest

from psync.errors import ConfigurationError
from psync.launch.interfaces import PYTHON, interface_towards, joined_with


def test_towards_this_machine_it_is_the_loopback_interface() -> None:
    assert interface_towards("127.0.0.1:22") == "127.0.0.1"
    assert interface_towards("localhost:22") in ("127.0.0.1", "::1")


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"nobody\.invalid:1 is unreachable: "):
        interface_towards("nobody.invalid:1")


def test_an_address_of_ipv6_gets_brackets() -> None:
    assert joined_with("10.0.0.1", 5) == "10.0.0.1:5"
    assert joined_with("fe80::1", 5) == "[fe80::1]:5"


def test_the_interpreter_is_named_by_what_its_bytecode_depends_on() -> None:
    assert sys.version.startswith(f"{PYTHON}.")
