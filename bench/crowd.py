"""Clients, good and bad: what they ask, how they listen, and what becomes of it. Speaks HTTP itself, so that it can do so badly.

Each client is one agent after another, with a talk of a few turns. Used by bench.load.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rewake.models import DEFAULT_MODEL

CONTEXT, ANSWER, TURNS = 4096, 128, 6  # tokens; tokens; turns of a talk, before the client begins another
LEAVES, HASTY, SLOW, BAD = 0.08, 0.04, 0.08, 0.06  # how often
SLOW_PAUSE, SLOW_BUFFER = 0.25, 2048  # seconds between reads; bytes
PATIENCE = 600.0  # seconds for an answer
KEY_GOES_HERE = "X-API-Key: "
TOPICS = "a lighthouse,the first train,bees in winter,a lost letter,the old bridge,a quiet harbour,copper mines,a night market".split(",")
RULES = "\n".join(f"Rule {n}: whatever you write, keep to the {n}th of the plain manners of a storyteller." for n in range(1, 40))
SYSTEM = {"role": "system", "content": f"You tell long stories.\n{RULES}"}


# ---- requests


def request(body: bytes, *headers: str, method: str = "POST", path: str = "/v1/chat/completions") -> bytes:
    head = [f"{method} {path} HTTP/1.1", KEY_GOES_HERE, "Host: localhost", "Connection: close", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def turn(agent: str, messages: Sequence[dict[str, str]], **fields: Any) -> bytes:
    asked = {"model": DEFAULT_MODEL, "messages": messages, "agent_id": agent, "stream": True, "temperature": 0, "max_tokens": ANSWER}
    return request(json.dumps({**asked, "stream_options": {"include_usage": True}, **fields}).encode())


def malformed() -> list[bytes]:
    """What must be answered with a 4xx, or by hanging up."""
    hello = [{"role": "user", "content": "Hello."}]
    return [
        b"\x16\x03\x01 this is not HTTP\r\n\r\n",
        request(b'{"model": '),
        request(b"\xff\xfe\x00"),
        request(b"[1, 2]"),
        turn("bad", hello, surprise=1),
        turn("bad", [{"role": "user", "content": "half \ud83d"}]),
        turn("../bad\0", hello),
        turn("bad", hello, max_tokens=-1),
        turn("bad", [{"role": "user", "content": "word " * (CONTEXT + 100)}]),
        turn("bad", hello, model="another"),
        request(b"{}", method="PUT"),
        request(b"", path="/v1/../../etc/passwd", method="GET"),
        turn("bad", hello)[:-40],  # and the rest never comes
        request(b"x" * 100, "Transfer-Encoding: nonsense"),
    ]


@dataclass
class Answer:
    """What came of one request. `status` 0: the server hung up without a word."""

    status: int
    retry_after: float = 1.0
    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)  # of chunks
    complete: bool = False
    error: str = ""


@dataclass(frozen=True)
class Manners:
    leave_after: int | None = None  # chunks
    pause: float = 0.0  # seconds between chunks


@dataclass(frozen=True)
class Address:
    port: int
    key: str


async def send(to: Address, data: bytes, manners: Manners) -> Answer:
    """Ask with the key, and listen."""
    with socket.socket() as plain:
        if manners.pause:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", to.port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=SLOW_BUFFER if manners.pause else 2**16)
        try:
            writer.write(data.replace(KEY_GOES_HERE.encode(), KEY_GOES_HERE.encode() + to.key.encode(), 1))
            await writer.drain()
            if manners.leave_after == 0:
                await asyncio.sleep(0.05)
                return Answer(0)
            return await receive(reader, manners)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def receive(reader: asyncio.StreamReader, manners: Manners) -> Answer:
    status = (await reader.readline()).split()
    answer = Answer(int(status[1]) if len(status) > 1 else 0)
    while (line := await reader.readline()).strip():
        if line.lower().startswith(b"retry-after:"):
            answer.retry_after = float(line.split(b":")[1])
    if answer.status != 200:
        await reader.read()
        return answer
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue  # the lengths of HTTP's chunks, and what keeps the stream alive
        if line.startswith(b"data: [DONE]"):
            answer.complete = not answer.error
            break
        take(answer, json.loads(line[6:]))
        if len(answer.times) == manners.leave_after:
            break
        if manners.pause:
            await asyncio.sleep(manners.pause)
    return answer


def take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        if piece := choice["delta"].get("content"):
            answer.text += piece
            answer.times.append(time.monotonic())
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]


# ---- clients


@dataclass
class Tally:
    """What happened, for all clients."""

    asked: int = 0  # well formed
    refused: int = 0
    done: int = 0
    left: int = 0
    malformed: int = 0
    ended: int = 0  # well formed or not
    wrong: Counter[str] = field(default_factory=Counter)  # what must not be
    ttft: list[float] = field(default_factory=list)  # seconds
    good: list[tuple[float, float]] = field(default_factory=list)  # when a chunk came, and how many tokens it stands for

    def rate(self, begin: float, end: float) -> float:
        return sum(tokens for at, tokens in self.good if begin <= at < end) / (end - begin)


class Client:
    """One agent after another, until `until`."""

    def __init__(self, number: int, server: Address, tally: Tally, until: float) -> None:
        self.number, self.server, self.tally, self.until = number, server, tally, until
        self.chance = random.Random(number)
        self.bad = malformed()
        self.talks = 0
        self.begin()

    def begin(self) -> None:
        self.talks += 1
        self.agent = f"client {self.number}, talk {self.talks}"
        self.messages: list[dict[str, str]] = [SYSTEM]

    async def run(self) -> None:
        while time.monotonic() < self.until:
            if self.chance.random() < BAD:
                await self.misbehave()
            else:
                await self.take_turn()

    async def misbehave(self) -> None:
        self.tally.malformed += 1
        answer = await self._send(self.chance.choice(self.bad), Manners(), patience=5.0)
        if answer.status == 200 or answer.status >= 500:
            self.tally.wrong[f"a malformed request got {answer.status}"] += 1

    async def take_turn(self) -> None:
        if len(self.messages) > 2 * TURNS:
            self.begin()
        topic = self.chance.choice(TOPICS)
        question = {"role": "user", "content": f"Tell a long story of {topic}, with {self.chance.randrange(2, 99)} people in it."}
        chance, manners = self.chance.random(), Manners()
        if chance < LEAVES + HASTY:
            manners = Manners(leave_after=0 if chance < HASTY else self.chance.randrange(1, ANSWER // 2))
        elif chance < LEAVES + HASTY + SLOW:
            manners = Manners(pause=SLOW_PAUSE)
        data, started = turn(self.agent, [*self.messages, question]), time.monotonic()
        while True:
            self.tally.asked += 1
            answer = await self._send(data, manners)
            if answer.status not in (429, 503):
                break
            self.tally.refused += 1
            await asyncio.sleep(answer.retry_after)
            if time.monotonic() >= self.until:
                return
        if answer.times:
            self.tally.ttft.append(answer.times[0] - started)
        if answer.complete:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
            self.tally.done += 1
            self.tally.good += [(at, answer.tokens / len(answer.times)) for at in answer.times]
        elif manners.leave_after is not None:
            self.tally.left += 1
        else:
            self.tally.wrong[answer.error or f"ended without an end, status {answer.status}"] += 1

    async def _send(self, data: bytes, manners: Manners, patience: float = PATIENCE) -> Answer:
        try:
            return await asyncio.wait_for(send(self.server, data, manners), patience)
        except TimeoutError:
            return Answer(0, error="no answer in time")
        except OSError as error:
            return Answer(0, error=f"{type(error).__name__} on the connection")
        finally:
            self.tally.ended += 1
