"""The server: who may look, what it answers, what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from psync.errors import ConfigurationError
from psync.status.dashboard.run_log import Recorder
from psync.status.http import HEADERS, STATIC, serving_dashboard
from psync.status.model import Status
from statuses import live_show, ps, status, worker
from view_schema import check_view

aiohttp = pytest.importorskip("aiohttp")


class Page:
    """A dashboard that is served, and a browser without cookies."""

    def __init__(self, show: Recorder, url: str, client: Any) -> None:
        self.show = show
        self.url = url
        self.base, _, self.token = url.partition("?token=")
        self.client = client

    async def get(
        self, path: str = "", *, token: bool = True, method: str = "GET", **headers: str
    ) -> tuple[int, str, Any]:
        """Return status, text and headers."""
        if token:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        asked = self.client.request(
            method, self.base + path, headers=headers, allow_redirects=False
        )
        async with asked as answer:
            return answer.status, await answer.text(), answer.headers


@pytest.fixture
async def page(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Page]:
    monkeypatch.setenv("PSYNC_DASHBOARD_HOSTS", " other.example.com,Proxy.example.com, ")
    show = live_show()
    jar = aiohttp.DummyCookieJar()
    async with (
        serving_dashboard(show, "127.0.0.1:0") as url,
        aiohttp.ClientSession(cookie_jar=jar) as client,
    ):
        yield Page(show, url, client)


async def test_the_url_opens_the_page_and_leaves_a_cookie(page: Page) -> None:
    code, _, headers = await page.get(f"?token={page.token}", token=False)
    assert (code, headers["Location"]) == (303, "./")
    cookie = headers["Set-Cookie"]
    port = page.base.rstrip("/").rpartition(":")[2]
    assert cookie.startswith(f"psync-{port}={page.token}; HttpOnly; SameSite=Lax")
    assert "Path" not in cookie  # so it is the page's own, behind a proxy, too
    code, text, _ = await page.get(token=False, Cookie=cookie.partition(";")[0])
    assert code == 200
    assert text == (STATIC / "index.html").read_text()


async def test_all_links_are_relative_and_of_this_place(page: Page) -> None:
    sources = [
        path for path in STATIC.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")
    ]
    assert len(sources) >= 7
    for path in sources:
        text = path.read_text()
        for link in re.findall(
            r"(?:href|src)=\"([^\"]*)\"|fetch\(`([^`]*)`|from \"([^\"]*)\"", text
        ):
            assert not "".join(link).startswith(("/", "http")), path
        if "vendor" not in path.parts:
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert "style=" not in text or path.suffix != ".html"  # the page's own policy forbids it
    linked = re.findall(r"(?:href|src)=\"(static/[^\"]*)\"", (STATIC / "index.html").read_text())
    for link in linked:
        code, _, headers = await page.get(link)
        assert code == 200
        assert headers["Content-Type"].split(";")[0] in (
            "text/css", "text/javascript", "application/javascript", "image/svg+xml",
        )  # fmt: skip


async def test_the_view_has_its_schema(page: Page) -> None:
    assert (await page.get("api/view"))[:2] == (200, "{}")
    page.show.history.add(status(worker(), ps(), reported={"loss": 0.5}))
    for query in ("", "?span=run", "?span=recent", "?time=5"):
        code, text, headers = await page.get(f"api/view{query}")
        assert (code, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
        check_view(json.loads(text))


async def test_the_status_is_as_everywhere(page: Page) -> None:
    assert (await page.get("api/status"))[:2] == (200, "{}")
    page.show.history.add(status(worker(), ps()))
    assert Status.from_json((await page.get("api/status"))[1]) == page.show.history.moments[-1]


@pytest.mark.parametrize(
    ("path", "text"),
    [("api/view?span=x", "span: expected recent or run, got 'x'"),
     ("api/view?time=x", "time: expected seconds since 1970"),
     ("api/view?time=nan", "time: expected seconds since 1970"),
     ("api/status?time=inf", "time: expected seconds since 1970")],
)  # fmt: skip
async def test_questions_that_make_no_sense(page: Page, path: str, text: str) -> None:
    code, answer, _ = await page.get(path)
    assert (code, answer) == (400, f"{text}\n")


@pytest.mark.parametrize("path", ["", "api/view", "api/status", "static/app.js", "nothing"])
async def test_nothing_is_shown_without_the_token(page: Page, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": "psync-1=x"}):
        code, text, _ = await page.get(path, token=False, **headers)
        assert code == 401
        assert "open the URL that the program has printed" in text
    assert (await page.get("api/view?token=wrong"))[0] == 401  # the wrong one is no right one


@pytest.mark.parametrize(
    "header", [b"Authorization: Bearer \xff", b"Cookie: psync-PORT=\xff", b"Cookie: \xe9=1"]
)
async def test_bytes_that_are_no_text_are_no_token(
    page: Page, header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    port = page.base.rstrip("/").rpartition(":")[2]
    for path in (b"/", b"/api/view", b"/static/app.js", b"/?token=%ff", b"/?token=%ED%A0%80"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        header = header.replace(b"PORT", port.encode())
        writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, header))
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
    assert caplog.text == ""


async def test_a_name_that_no_file_can_have_is_not_found(page: Page) -> None:
    assert (await page.get(f"static/{'a' * 300}"))[0] == 404


@pytest.mark.parametrize("path", ["", "api/view", "static/app.js"])
async def test_names_that_are_not_ours_are_refused_even_with_the_token(
    page: Page, path: str
) -> None:
    code, text, _ = await page.get(path, Host="evil.example.com")
    assert (code, "PSYNC_DASHBOARD_HOSTS" in text) == (421, True)
    assert (await page.get(path, Host="proxy.example.com"))[0] == 200


async def test_it_only_reads(page: Page) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert (await page.get("api/view", method=method))[0] == 405


@pytest.mark.parametrize(
    "path", ["static/../server.py", "static/%2e%2e/server.py", "static//etc/passwd", "static/x"]
)
async def test_no_other_file_is_served(page: Page, path: str) -> None:
    assert (await page.get(path))[0] in (403, 404)


async def test_every_answer_is_protected(page: Page) -> None:
    answers = [
        await page.get(), await page.get("api/view"), await page.get("static/app.js"),
        await page.get("nothing"), await page.get("", token=False),
        await page.get("", Host="evil.example.com"),
    ]  # fmt: skip
    for _, _, headers in answers:
        assert {name: headers[name] for name in HEADERS} == dict(HEADERS)


async def test_a_port_in_use_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="is in use by another program"):
            async with serving_dashboard(live_show(), address):
                pass
    with pytest.raises(ConfigurationError, match=r"cannot listen at 192\.0\.2\.1:0"):
        async with serving_dashboard(live_show(), "192.0.2.1:0"):
            pass


async def test_ipv6_and_all_interfaces_have_urls_that_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving_dashboard(live_show(), "127.0.0.1:0"):
        assert caplog.text == ""
    async with serving_dashboard(live_show(), "0.0.0.0:0") as url:
        assert url.startswith("http://127.0.0.1:")
        assert "the dashboard at 0.0.0.0:0 has no TLS" in caplog.text
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return  # this machine has no IPv6
    async with serving_dashboard(live_show(), "[::1]:0") as url:
        assert url.startswith("http://[::1]:")


async def test_tokens_are_of_one_run() -> None:
    async with (
        serving_dashboard(live_show(), "127.0.0.1:0") as one,
        serving_dashboard(live_show(), "127.0.0.1:0") as two,
    ):
        assert one.partition("token=")[2] != two.partition("token=")[2]
        assert len(one.partition("token=")[2]) == 48


def test_what_comes_from_others_has_its_licence() -> None:
    vendor = Path(STATIC, "vendor")
    assert "MIT" in (vendor / "uPlot.LICENSE").read_text()
    assert (vendor / "uPlot.js").stat().st_size < 60_000
