# SPDX-License-Identifier: Apache-2.0
"""A SuperLink's bell: who asks for messages where there are none is answered when one comes, or in a while.

Otherwise every node would ask many times a second, each time at the price of a few milliseconds of the one
process that serves all. ASGI middleware; what it lets through is answered by Flower as ever.
"""

import asyncio
from collections import Counter, defaultdict

from hofl.runtime.flower.guard import App, Receive, Scope, Send
from hofl.runtime.flower.internal import SERVER, who_pulls

HOLD = {"/v1/fleet/pull-messages": 2.0, "/v1/runtime/pull-messages": 0.5}
"""Seconds that a question for messages may wait, by path: a node's, and a run's own."""

SMALL, PEERS = 1 << 14, 4096
"""Bytes of a question that may wait, and connections that are remembered."""


class Bell:
    """Rings for a node, heard by whoever waits for it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung: Counter[int] = Counter()
        self._waiting: defaultdict[int, set[asyncio.Event]] = defaultdict(set)

    def ring(self, node: int) -> None:
        """There is something new for a node; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._heard, node)

    def _heard(self, node: int) -> None:
        self._rung[node] += 1
        for event in self._waiting.pop(node, ()):
            event.set()

    async def wait(self, node: int, since: int | None, seconds: float) -> int:
        """Wait until it has rung for a node since it had rung so often, or for so long -> how often by now.

        Args:
            node: whom it rings for.
            since: what this said last; None does not wait.
            seconds: at most.
        """
        self._loop = asyncio.get_running_loop()
        if since == self._rung[node]:
            event = asyncio.Event()
            self._waiting[node].add(event)
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                self._waiting[node].discard(event)
        return self._rung[node]


BELL = Bell()
"""Of this process."""


class Patience:
    """ASGI middleware: lets a question for messages wait for the bell where the last answer was empty."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._empty: dict[object, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, at once or later."""
        seconds = HOLD.get(scope.get("path", ""))
        if seconds is None:
            return await self._app(scope, receive, send)
        first, told = await receive(), False
        body, peer, size = first.get("body", b""), (scope["path"], scope.get("client")), 0
        node = SERVER if scope["path"].startswith("/v1/runtime/") else who_pulls(body)
        known = bool(node) and not first.get("more_body") and len(body) <= SMALL
        rung = await BELL.wait(node, self._empty.pop(peer, None) if known else None, seconds)

        async def _receive() -> Scope:
            nonlocal told
            if told:
                return await receive()
            told = True
            return first

        async def _send(message: Scope) -> None:
            nonlocal size
            size += len(message.get("body", b""))
            await send(message)

        await self._app(scope, _receive, _send)
        if known and not size and len(self._empty) < PEERS:
            self._empty[peer] = rung
