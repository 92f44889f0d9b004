"""A real S3 server, and a gateway before it that fails as networks and clouds do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest import mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "hidden-key", "AWS_DEFAULT_REGION": "us-east-1"}
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Start a server with an empty bucket, whose variables are set meanwhile; skips the test without its packages."""
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    s3 = server.ThreadedMotoServer(port=0)
    s3.start()
    host, port = s3.get_host_and_port()
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    with urlopen(Request(f"{address}/moto-api/reset", method="POST")):  # what another test has put there
        pass
    with mock.patch.dict(os.environ, {**KEYS, "AWS_ENDPOINT_URL": address}):
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(bucket)
        yield address
    s3fs.S3FileSystem.clear_instance_cache()
    s3.stop()


SLOW_S = 30.0
# Says what happens to a request by its method, path and the number of requests like it before: `busy`, `expired`,
# `cut`, `slow` or nothing.
Fault = Callable[[str, str, int], str]


class Handler(BaseHTTPRequestHandler):
    """Passes requests on, or fails them."""

    server: Gateway
    protocol_version = "HTTP/1.1"  # clients ask before they send a body

    def answer(self) -> None:
        """Answer a request of any method."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = (self.command, self.path)
        self.server.seen[key] = self.server.seen.get(key, -1) + 1
        fault = self.server.fault(self.command, self.path, self.server.seen[key])
        if fault == "slow":
            time.sleep(SLOW_S)
        if fault in ("busy", "expired"):
            self.reply(503 if fault == "busy" else 400, {}, b"" if fault == "busy" else EXPIRED)
            return
        headers = {"Content-Type": "application/octet-stream", **dict(self.headers)}  # urllib's own means a form
        request = Request(self.server.target + self.path, method=self.command, headers=headers, data=body or None)
        try:
            with urlopen(request) as response:
                self.reply(response.status, dict(response.headers), response.read(), cut=fault == "cut")
        except HTTPError as error:
            self.reply(error.code, dict(error.headers), error.read())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    def reply(self, code: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        """Send an answer, or only the first half of it."""
        self.send_response(code)
        length = headers.get("Content-Length", str(len(content)))
        for name, value in {**headers, "Content-Length": length}.items():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Gateway(ThreadingHTTPServer):
    """Stands before a server at `target`."""

    def __init__(self, target: str, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.fault = target, fault
        self.seen: dict[tuple[str, str], int] = {}


@contextmanager
def gateway(target: str, fault: Fault) -> Iterator[Gateway]:
    """Start a gateway, which is the server that the variables name meanwhile."""
    from s3fs import S3FileSystem

    server = Gateway(target, fault)
    Thread(target=server.serve_forever, daemon=True).start()
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}):
        S3FileSystem.clear_instance_cache()
        yield server
    S3FileSystem.clear_instance_cache()
    server.shutdown()
