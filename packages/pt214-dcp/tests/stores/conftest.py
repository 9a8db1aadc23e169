"""An S3 server of our own, and a proxy before it that answers, delays and drops as it is told."""

from __future__ import annotations

import http.client
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pt214_dcp.stores import Place, StoreOptions, open_store

KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
BUCKET = "bucket"


@dataclass
class Faults:
    """What the proxy does to requests.

    Attributes:
        rule: from method, path with its query, and how often such a request came, to a fault:
            ``"500"``, ``"503"``, ``"drop"`` (before the server sees it), ``"lose"`` (its answer is
            lost), ``"half"`` (the answer ends midway), ``"delay"``; None passes it on.
        seen: every request, as (method, path, fault).
    """

    rule: Callable[[str, str, int], str | None] = lambda method, path, count: None
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    delay_s: float = 1.5
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, method: str, path: str) -> str | None:
        with self.lock:
            count = sum((method, path) == item[:2] for item in self.seen)
            fault = self.rule(method, path, count)
            self.seen.append((method, path, fault))
            return fault

    @property
    def done(self) -> int:
        """Faults so far."""
        return sum(item[2] is not None for item in self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    server_port: int

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.faults.of(self.command, self.path)
        if fault == "drop":
            self._hang_up()
            return
        if fault in ("500", "503"):
            text = b"<Error><Code>SlowDown</Code><Message>reduce your rate</Message></Error>"
            self._answer(int(fault), [("content-type", "application/xml")], text)
            return
        if fault == "delay":
            time.sleep(self.faults.delay_s)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        found = upstream.getresponse()
        data, headers = found.read(), found.getheaders()
        upstream.close()
        if fault == "lose":
            self._hang_up()
        elif fault == "half":
            self._answer(found.status, headers, data, data[: len(data) // 2])
            self._hang_up()
        else:
            self._answer(found.status, headers, data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, sent: bytes | None = None
    ) -> None:
        self.send_response(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # of a HEAD, whose answer has no body
            elif name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(data if sent is None else sent)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is what these tests are about."""


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Port of the server."""
    server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("PUT", f"/{BUCKET}")
    assert client.getresponse().status == 200
    yield port
    running.stop()


@pytest.fixture
def faults(s3_port: int) -> Iterator[tuple[Faults, int]]:
    """What the proxy does, and its port."""
    faults = Faults()
    handler = type("Handler", (_Handler,), {"faults": faults, "server_port": s3_port})
    proxy = _Proxy(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield faults, proxy.server_address[1]
    proxy.shutdown()
    proxy.server_close()
    thread.join()


_names = itertools.count()


def options(port: int, **chosen: Any) -> StoreOptions:
    """For the server or proxy at ``port``."""
    config = {"endpoint": f"http://127.0.0.1:{port}", **KEYS}
    return StoreOptions(config=config, **chosen)


@pytest.fixture
def s3(s3_port: int) -> Place:
    """An empty place in the bucket, straight to the server."""
    return Place(open_store(f"s3://{BUCKET}/t{next(_names)}", options(s3_port)))


@pytest.fixture
def shaky(faults: tuple[Faults, int]) -> tuple[Place, Faults]:
    """An empty place in the bucket behind the proxy, and what the proxy does."""
    found, port = faults
    chosen = options(port, timeout_s=1.0, max_retries=4, retry_s=20.0, part_bytes=5 << 20)
    return Place(open_store(f"s3://{BUCKET}/t{next(_names)}", chosen)), found
