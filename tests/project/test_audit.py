"""`make audit`: the real pip-audit against a server that answers as OSV's does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[2]
HASH = f"--hash=sha256:{'0' * 64}"
# An entry as OSV's schema has it: https://ossf.github.io/osv-schema/.
ENTRY = {
    "schema_version": "1.7.0",
    "id": "GHSA-aaaa-bbbb-cccc",
    "summary": "A crafted image writes out of bounds",
    "aliases": ["CVE-2099-0001"],
    "published": "2026-01-02T03:04:05Z",
    "affected": [
        {
            "package": {"name": "pillow", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "12.0.1"}]}],
        }
    ],
}
ALLOWED = '[[allowed]]\npackage = "{}"\nid = "{}"\nreason = "no strangers\' images are read here"\n'


class Osv(BaseHTTPRequestHandler):
    """Knows one hole, of pillow 12.0.0."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        has_hole = (query["package"], query["version"]) == ({"name": "pillow", "ecosystem": "PyPI"}, "12.0.0")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [ENTRY]} if has_hole else {}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Osv)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()


def run_audit(folder: Path, url: str, pillow: str, allowed: str = "") -> subprocess.CompletedProcess[str]:
    lock = folder / "lock.txt"
    lock.write_text(f"idna==3.20 \\\n    {HASH}\npillow=={pillow} ; python_version >= '3.11' \\\n    {HASH}\n")
    (folder / "allowed.toml").write_text(allowed)
    words = [sys.executable, str(ROOT / "tools/audit.py"), f"--osv-url={url}", f"--allowed={folder}/allowed.toml", lock]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("pillow", "allowed", "code", "said"),
    [
        ("13.0.0", "", 0, "audit: 0 new, 0 allowed"),
        (
            "12.0.0",
            "",
            1,
            "pillow 12.0.0: CVE-2099-0001, GHSA-aaaa-bbbb-cccc, fixed in 12.0.1\naudit: 1 new, 0 allowed",
        ),
        ("12.0.0", ALLOWED.format("pillow", "CVE-2099-0001"), 0, "no strangers' images are read here\naudit: 0 new, 1"),
        ("12.0.0", ALLOWED.format("torch", "CVE-2099-0001"), 1, "audit: 1 new, 0 allowed"),
        ("13.0.0", ALLOWED.format("pillow", "CVE-2099-0001"), 0, "no longer found: pillow: CVE-2099-0001. Remove it"),
    ],
)
def test_audit_fails_on_new_holes(tmp_path: Path, osv: str, pillow: str, allowed: str, code: int, said: str) -> None:
    done = run_audit(tmp_path, osv, pillow, allowed)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


@pytest.mark.launch
def test_audit_without_its_service_is_no_success(tmp_path: Path) -> None:
    done = run_audit(tmp_path, "http://127.0.0.1:1/v1/query", "13.0.0")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert done.stderr.startswith("audit: not done: lock.txt: pip-audit has no answer of http://127.0.0.1:1/v1/query: ")


def test_every_allowed_hole_has_a_reason() -> None:
    sys.path.insert(0, str(ROOT))
    from tools.audit import ALLOWED as FILE, allowed_holes

    allowed = allowed_holes(FILE)
    assert all(len(reason) > 20 for reason in allowed.values())
