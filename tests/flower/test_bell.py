# SPDX-License-Identifier: Apache-2.0
"""The bell of a SuperLink: questions for messages wait for it, and for nothing else."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node

from hofl.runtime.flower import bell
from hofl.runtime.flower.internal import SERVER

NODE, OTHER = 7, 8
FLEET, RUN = bell.HOLD


def scope(path: str, peer: int = 1) -> dict[str, Any]:
    return {"type": "http", "path": path, "client": ("127.0.0.1", peer)}


class Flower:
    """An ASGI application that answers with a body and notes what it was asked."""

    def __init__(self) -> None:
        self.body, self.asked = b"", list[bytes]()

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        asked, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            asked, more = asked + message["body"], message.get("more_body", False)
        self.asked.append(asked)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


async def ask(layer: bell.Patience, path: str, parts: list[bytes], peer: int = 1) -> float:
    """Send a request in parts; the seconds until it is answered."""
    left = list(parts)

    async def _receive() -> dict[str, Any]:
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def _send(message: Any) -> None:
        pass

    begun = time.monotonic()
    await layer(scope(path, peer), _receive, _send)
    return time.monotonic() - begun


def pull(node: int) -> list[bytes]:
    return [PullMessagesRequest(node=Node(node_id=node)).SerializeToString()]


def test_an_empty_answer_makes_the_next_question_wait_for_its_own_bell() -> None:
    async def _run() -> None:
        flower = Flower()
        layer = bell.Patience(flower)
        assert await ask(layer, FLEET, pull(NODE)) < 0.2
        later = asyncio.get_running_loop()
        later.call_later(0.1, bell.BELL.ring, OTHER)
        later.call_later(0.4, bell.BELL.ring, NODE)
        assert 0.35 < await ask(layer, FLEET, pull(NODE)) < 1.5
        bell.BELL.ring(NODE)  # between two questions: the next must not wait
        await asyncio.sleep(0)
        assert await ask(layer, FLEET, pull(NODE)) < 0.2
        assert flower.asked == [pull(NODE)[0]] * 3

    asyncio.run(_run())


def test_waiting_ends_by_itself(monkeypatch: Any) -> None:
    async def _run() -> None:
        layer = bell.Patience(Flower())
        await ask(layer, RUN, [b""])
        assert 0.2 < await ask(layer, RUN, [b""]) < 1.5
        assert 0.2 < await ask(layer, RUN, [b""]) < 1.5

    monkeypatch.setitem(bell.HOLD, RUN, 0.25)
    asyncio.run(_run())


def test_after_a_message_the_next_question_does_not_wait() -> None:
    async def _run() -> None:
        flower = Flower()
        layer = bell.Patience(flower)
        await ask(layer, FLEET, pull(NODE))
        asyncio.get_running_loop().call_later(0.05, bell.BELL.ring, NODE)
        flower.body = b"a message"
        await ask(layer, FLEET, pull(NODE))
        assert await ask(layer, FLEET, pull(NODE)) < 0.2

    asyncio.run(_run())


def test_a_run_hears_answers_and_other_connections_do_not_share_its_wait() -> None:
    async def _run() -> None:
        layer = bell.Patience(Flower())
        await ask(layer, RUN, [b"x"])
        asyncio.get_running_loop().call_later(0.1, bell.BELL.ring, SERVER)
        assert await ask(layer, RUN, [b"x"], peer=2) < 0.08
        assert 0.05 < await ask(layer, RUN, [b"x"]) < 0.45

    asyncio.run(_run())


def test_large_and_broken_questions_and_other_paths_pass_at_once_and_whole() -> None:
    async def _run() -> None:
        flower = Flower()
        layer, large = bell.Patience(flower), bytes(bell.SMALL + 1)
        for path, parts in ((FLEET, [large]), (FLEET, [b"a", b"b"]), ("/v1/fleet/push-messages", [b"c"])):
            for _ in range(2):
                assert await ask(layer, path, parts) < 0.2
        assert flower.asked == [large, large, b"ab", b"ab", b"c", b"c"]
        assert await ask(layer, FLEET, [b"\xff\xff"]) < 0.2  # Flower refuses it

    asyncio.run(_run())


def test_it_forgets_what_it_cannot_hold(monkeypatch: Any) -> None:
    async def _run() -> None:
        layer = bell.Patience(Flower())
        for peer in (1, 2, 3):
            await ask(layer, FLEET, pull(NODE), peer)
        assert len(layer._empty) == 2

    monkeypatch.setattr(bell, "PEERS", 2)
    asyncio.run(_run())
