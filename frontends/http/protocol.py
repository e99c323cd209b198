"""uvicorn's protocol with one system call for a short answer: it writes the head and the body of a response one after the other, and uvloop sends each at once."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD = b"HTTP/1.1 "


class Joining:
    """A connection's transport that keeps the head of a response back until its body is there, or the loop comes round."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""
        self.is_closing, self.get_extra_info = transport.is_closing, transport.get_extra_info  # asked for each request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """As asyncio's transports do: what comes after the end is dropped, where uvloop's raise."""
        if self.is_closing():
            self._head = b""
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """As a transport does: what was written goes out first."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            if not self.is_closing():
                self._transport.write(head)


class Protocol(HttpToolsProtocol):
    """For uvicorn.Config(http=...)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        super().connection_made(Joining(transport, self.loop))  # type: ignore[arg-type]
