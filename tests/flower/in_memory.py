# SPDX-License-Identifier: Apache-2.0
"""A Flower grid without sockets: real messages and roles, one process, so that what fails can be chosen."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from uuid import uuid4

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from hofl.runtime.flower.role import Role

Spoil = Callable[[Message, RecordDict], RecordDict | None]
"""(question, true answer's content) -> what is sent instead; None sends nothing."""


class InMemory(Grid):
    """Answers each message at once by the role of its node; ``spoil`` has the last word."""

    def __init__(self, roles: dict[int, Role]) -> None:
        self.roles, self.waiting = roles, dict[str, Message]()
        self.spoil: Spoil = lambda question, content: content
        self.asked: list[Message] = []
        self.activated = dict.fromkeys(roles, "once")
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=node, last_activated_at=self.activated.get(node, "once"), public_key=b"")
            for node in self.roles
        ]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.roles)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name = str(uuid4())
            message.metadata.__dict__["_message_id"] = name
            self.asked.append(message)
            names.append(name)
            role = self.roles.get(message.metadata.dst_node_id)
            if role is None:
                continue
            content = self.spoil(message, role.answer(message.content))
            if content is not None:
                self.waiting[name] = Message(content, reply_to=message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.waiting.pop(name) for name in list(message_ids) if name in self.waiting]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError
