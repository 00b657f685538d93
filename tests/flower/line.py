# SPDX-License-Identifier: Apache-2.0
"""A line to a server on this machine that can be cut, and that can lose an answer."""

import socket
from contextlib import suppress
from threading import Thread
from typing import Self

from fleet import free_port


class Line:
    """A line to a port on this machine that can be cut: bytes pass while it is whole.

    While it is cut, connections that were open are dead and new ones are refused.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._pairs: list[socket.socket] = []
        self._bite = range(0)
        self.swallowed = 0
        self.port = free_port()
        self.heal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()

    def heal(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        for end in (self._listener, *self._pairs):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._pairs.clear()

    def swallow(self, sizes: range) -> None:
        """The next answer of so many bytes that comes in one piece is lost, with its connection."""
        self._bite = sizes

    def _lost(self, data: bytes) -> bool:
        if len(data) not in self._bite:
            return False
        self._bite, self.swallowed = range(0), len(data)
        return True

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), 5.0)
                except OSError:  # no server there now
                    near.close()
                    continue
                self._pairs += near, far
                for ends in ((near, far, False), (far, near, True)):
                    Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self._lost(data):
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
