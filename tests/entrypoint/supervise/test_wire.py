"""Lines of the failure channel: each is the next one of its sender, who has the job's key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from entrypoint.supervise.wire import MAX_LINE_BYTES, Session, WireError

KEY = b"the key of this job"
MESSAGES = st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), min_size=1), max_size=5)


def open_sessions(client_key: bytes = KEY, server_key: bytes = KEY) -> tuple[Session, Session]:
    client, server = Session(client_key), Session(server_key, is_server=True)
    assert server.decode(client.greeting()) == client.decode(server.greeting()) == []
    return client, server


@given(MESSAGES, MESSAGES, st.integers(1, 50), st.sampled_from([KEY, b""]))
def test_messages_arrive_as_sent(there: list[dict], back: list[dict], piece: int, key: bytes) -> None:  # type: ignore[type-arg]
    client, server = open_sessions(key, key)
    for sender, receiver, messages in ((client, server, there), (server, client, back)):
        data = b"".join(sender.encode(message) for message in messages)
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        assert [message for one in pieces for message in receiver.decode(one)] == messages


def test_heartbeat_is_no_message() -> None:
    client, server = open_sessions()
    assert server.decode(client.encode({}) + client.encode({"bye": 1})) == [{"bye": 1}]


def first(data: bytes) -> bytes:
    return data.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda client, _: client.encode({"a": 1}).replace(b"1", b"2", 1), id="changed"),
        pytest.param(lambda client, _: (client.encode({"a": 1}), client.encode({"b": 2}))[1], id="one left out"),
        pytest.param(lambda client, _: client.encode({"a": 1}) * 2, id="replayed"),
        pytest.param(lambda _, server: server.encode({"a": 1}), id="its own sent back"),
        pytest.param(lambda *_: json.dumps({"first_failure": {}}).encode() + b"\n", id="without a code"),
        pytest.param(lambda *_: b"\t" + b"0" * 32 + b"\n", id="code of another key"),
        pytest.param(lambda *_: b"\xff\xfe\n", id="no text"),
    ],
)
def test_line_of_a_stranger_is_refused(tamper) -> None:  # type: ignore[no-untyped-def]
    client, server = open_sessions()
    with pytest.raises(WireError):
        server.decode(tamper(client, server))


def test_line_of_another_connection_is_refused() -> None:
    (client, _), (_, server) = open_sessions(), open_sessions()
    with pytest.raises(WireError, match="another key"):
        server.decode(client.encode({"hello": {}}))


@pytest.mark.parametrize(
    ("client_key", "server_key", "said"),
    [(b"", KEY, "it has no key"), (KEY, b"", "asks for the job's key"), (b"another key of a job", KEY, "another key")],
)
def test_other_key_is_named(client_key: bytes, server_key: bytes, said: str) -> None:
    client, server = Session(client_key), Session(server_key, is_server=True)
    client.decode(Session(client_key, is_server=True).greeting())
    with pytest.raises(WireError, match=said):
        server.decode(client.greeting() + client.encode({"hello": {}}))


@pytest.mark.parametrize("key", [KEY, b""])
@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", b"\n", b"reference-training-1 key short\n", b"x" * (MAX_LINE_BYTES + 1)],
)
def test_other_protocol_is_refused(key: bytes, data: bytes) -> None:
    with pytest.raises(WireError):
        Session(key, is_server=True).decode(data)


@pytest.mark.parametrize("text", [b"[" * 8000, b"[]", b"7", b"{", b"\x00"])
def test_text_that_is_no_message_is_refused(text: bytes) -> None:
    _, server = open_sessions(b"", b"")
    with pytest.raises(WireError, match="invalid"):
        server.decode(text + b"\n")


def test_line_without_an_end_is_refused() -> None:
    client, server = open_sessions()
    assert server.decode(client.encode({"how": "x" * (MAX_LINE_BYTES - 100)})) != []
    for _ in range(MAX_LINE_BYTES // 1000):
        assert server.decode(b"x" * 1000) == []
    with pytest.raises(WireError, match="a line of more than 65536 bytes"):
        server.decode(b"x" * 1000)
