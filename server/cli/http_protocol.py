"""uvicorn's HTTP protocol with a bound on what a client may send before its headers are complete."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.guard import MAX_HEADER_BYTES


class BoundedHttpProtocol(HttpToolsProtocol):
    """Mutable as its base: one connection. The guard refuses too many headers politely once they are complete;
    this closes a connection whose headers never are."""

    _num_head_bytes = 0
    _has_head = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_head_bytes = 0 if self._has_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._has_head = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_head = True
        super().on_headers_complete()
