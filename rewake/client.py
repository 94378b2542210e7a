"""A running server, from Python: its agents as objects, and talks with them.

    with Client() as client:
        client.fork("ada", "ada-2")
        for event in client.chat([{"role": "user", "content": "Say hello."}], agent="ada-2"):
            ...

Answers are the server's JSON objects. What it refuses is raised as the error of `rewake.errors` it means, with its message.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rewake.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestError,
    RewakeError,
    ShuttingDown,
    Unauthorized,
)

__all__ = ["Client"]

CONNECT_SECONDS = 10  # an answer may take as long as it likes
ERRORS: dict[str, type[RequestError]] = {
    error.kind: error
    for error in (
        *(InvalidRequest, Unauthorized, Forbidden, NotFound, Conflict, DeadlineExceeded),
        *(Overloaded, RateLimited, ShuttingDown, InternalError),
    )
}
Json = dict[str, Any]


class Client:
    """Speaks to one server, of one of its models; close it, or use it in a `with`.

    The key, where one is needed, is REWAKE_API_KEY if it is not given.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", model: str | None = None, api_key: str | None = None) -> None:
        """`model` is one of those that the server runs; its first one, if none is named. Some verbs take another one, too.

        `url` may end in `/v1`, as other clients want it.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        key = api_key or os.environ.get("REWAKE_API_KEY")
        self._http = httpx.Client(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(CONNECT_SECONDS, read=None),
            trust_env=False,
            params=of_model(model),
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- agents

    def list(self) -> list[Json]:
        found: list[Json] = self._json("GET", "/v1/agents")["data"]
        return found

    def show(self, agent: str) -> Json:
        return self._json("GET", path_of(agent))

    def create(self, agent: str, *, pinned: bool = False, ttl: float | None = None) -> Json:
        return self._json("POST", "/v1/agents", json={"agent": agent, "pinned": pinned, "ttl": ttl})

    def update(self, agent: str, **changes: bool | float | None) -> Json:
        """Set `pinned`, or `ttl`: seconds after the last use, None for ever."""
        return self._json("PATCH", path_of(agent), json=changes)

    def fork(self, agent: str, to: str, *, turn: int | None = None, tokens: int | None = None, model: str | None = None) -> Json:
        """A new agent that remembers what `agent` does; up to the end of an answer, or so many tokens, if that is said."""
        return self._json("POST", path_of(agent, "fork"), json={"to": to, "turn": turn, "tokens": tokens}, params=of_model(model))

    def rewind(self, agent: str, *, turn: int | None = None, tokens: int | None = None, model: str | None = None) -> Json:
        return self._json("POST", path_of(agent, "rewind"), json={"turn": turn, "tokens": tokens}, params=of_model(model))

    def wake(self, agent: str) -> Json:
        """Have its pages read before its next turn."""
        return self._json("POST", path_of(agent, "wake"))

    def cancel(self, agent: str) -> Json:
        """Stop what it is asked; how many requests that were. What they have computed is remembered."""
        return self._json("POST", path_of(agent, "cancel"))

    def forget(self, agent: str, *, model: str | None = None) -> None:
        self._json("DELETE", path_of(agent), params=of_model(model))

    def export(self, agent: str, path: str | os.PathLike[str]) -> int:
        """Write the agent into a file; its size. What was there is replaced once all of it has come."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with self._http.stream("POST", path_of(agent, "export")) as response:
                self._checked(response)
                with open(temporary, "xb") as file:
                    for chunk in response.iter_bytes():
                        file.write(chunk)
                    size = file.tell()
            os.replace(temporary, target)
        except httpx.ConnectError:
            raise self._nobody() from None
        except OSError as error:
            raise RewakeError(f"{path}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return size

    def import_(self, path: str | os.PathLike[str], name: str | None = None) -> Json:
        """Take in what `export` wrote, as `name` or as it was called there."""
        try:
            with open(path, "rb") as file:
                return self._json("POST", "/v1/agents/import", content=file, params={} if name is None else {"agent": name})
        except OSError as error:
            raise RewakeError(f"{path}: {error.strerror}") from error

    # ---- talks

    def model(self) -> str:
        """What the server calls the model that is meant."""
        return self._model or str(self._json("GET", "/v1/models")["data"][0]["id"])

    def chat(self, messages: Sequence[Json], *, agent: str | None = None, model: str | None = None, **fields: Any) -> Iterator[Json]:
        """The chunks of a streamed answer, as in the OpenAI protocol; the last one has `rewake`. `fields` as there."""
        body = {"model": model or self.model(), "messages": list(messages), "stream": True, "agent_id": agent, **fields}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in self._checked(response).iter_lines():
                    if (event := event_of(line)) is not None:
                        yield event
        except httpx.ConnectError:
            raise self._nobody() from None

    async def chat_async(self, messages: Sequence[Json], *, agent: str | None, model: str, **fields: Any) -> AsyncGenerator[Json, None]:
        """As `chat`, for asyncio; leaving early closes the connection, and so cancels the answer."""
        body = {"model": model, "messages": list(messages), "stream": True, "agent_id": agent, **fields}
        http = httpx.AsyncClient(
            base_url=self.url,
            headers=self._http.headers,
            timeout=self._http.timeout,
            trust_env=False,
            verify=self.url.startswith("https"),  # else the certificates are read for nothing
        )
        try:
            async with http, http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                self._checked(response)
                async for line in response.aiter_lines():
                    if (event := event_of(line)) is not None:
                        yield event
        except httpx.ConnectError:
            raise self._nobody() from None

    def messages(self, agent: str, *, model: str | None = None) -> Sequence[Json]:
        """What the agent remembers, as messages to go on from. Raises NotFound, and InvalidRequest where that cannot be told."""
        found: Sequence[Json] = self._json("GET", f"/v1/rewake/messages/{quoted(agent)}", params=of_model(model))["messages"]
        return found

    # ---- the wire

    def _json(self, method: str, path: str, **request: Any) -> Json:
        try:
            response = self._checked(self._http.request(method, path, **request))
        except httpx.ConnectError:
            raise self._nobody() from None
        try:
            answer: Json = response.json()
        except ValueError:
            raise self._stranger(response) from None
        return answer

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            response.read()
            try:
                raise error_of(response.json(), response.headers.get("retry-after"))
            except (ValueError, KeyError, TypeError):
                raise self._stranger(response) from None
        return response

    def _nobody(self) -> ConfigError:
        return ConfigError(f"no server at {self.url}: start one with `rewake serve`, or name its port")

    def _stranger(self, response: httpx.Response) -> ConfigError:
        return ConfigError(f"{self.url} is not a rewake server, or not well: {response.status_code}")


def path_of(agent: str, verb: str = "") -> str:
    """An id is one part of the path, whatever is in it; it never becomes another route."""
    if not agent or agent in (".", ".."):  # these would name the folder above
        raise InvalidRequest("an agent id is not empty, and not . or ..", param="agent")
    return f"/v1/agents/{quoted(agent)}" + (f"/{verb}" if verb else "")


def of_model(model: str | None) -> dict[str, str]:
    """For one request: another model than the client's."""
    return {"model": model} if model else {}


def quoted(agent: str) -> str:
    return quote(agent, safe="", errors="surrogatepass")


def event_of(line: str) -> Json | None:
    """The event in a line of a stream, if there is one. Raises the error that it tells."""
    if not line.startswith("data: {"):
        return None
    event: Json = json.loads(line[6:])
    if "error" in event:
        raise error_of(event)
    return event


def error_of(body: Json, retry_after: str | None = None) -> RequestError:
    error, seconds = body["error"], int(retry_after) if retry_after and retry_after.isdecimal() else None
    known = ERRORS.get(error["type"], RequestError)
    return known(error["message"], param=error.get("param"), code=error.get("code"), retry_after=seconds)
