"""What the store makes of bytes: whole commands however they are split, and nothing of a stranger's."""

from __future__ import annotations

import struct

from hypothesis import given, strategies as st

from entrypoint.supervise.store_commands import COMMANDS, MAGIC, StoreSession
from entrypoint.supervise.wire import WireError


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_commands_or_refused(pieces: list[bytes]) -> None:
    session = StoreSession()
    try:
        for piece in pieces:
            for name, *_ in session.decode(piece):
                assert name in dict(COMMANDS)
    except WireError:
        pass


@given(st.lists(st.integers(1, 30), max_size=20))
def test_commands_come_whole_however_they_are_split(sizes: list[int]) -> None:
    data = struct.pack("<BI", 0, MAGIC) + b"\1" + b"".join(struct.pack("<Q", 3) + text for text in (b"key", b"abc"))
    data += b"\5" + struct.pack("<QQ", 1, 3) + b"key"
    session, commands = StoreSession(), []
    for size in [*sizes, len(data)]:
        commands += session.decode(data[:size])
        data = data[size:]
    assert commands == [("validate", MAGIC), ("set", b"key", b"abc"), ("check", [(b"key",)])]
