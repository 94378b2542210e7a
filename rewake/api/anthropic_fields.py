"""What can be asked for in Anthropic's protocol. Every field is obeyed, a documented no-op, or refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from rewake.api.fields import Stops, Strict, check_text, only, stops
from rewake.api.generation import Ask, Chat, Form
from rewake.api.openai_fields import FUNCTION_NAME, MOST_TOOLS
from rewake.errors import InvalidRequest
from rewake.request import Sampling
from rewake.text.toolcalls import parse_arguments
from rewake.text.tools import Choice, Tool

__all__ = ["CountRequest", "MessagesRequest"]


class CacheControl(Strict):
    """A no-op: everything is remembered."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    """A part of a message; which fields it has depends on its type. Images and documents are refused: models here read text."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: CacheControl | None = None
    citations: Annotated[Any, only([])] = None
    caller: Annotated[Any, only({"type": "direct"})] = None

    def check(self, field: str) -> None:
        wanted = FIELDS[self.type]
        for name in self.model_fields_set - {"type", "cache_control", "citations", "caller", *wanted}:
            if getattr(self, name) is not None:
                raise InvalidRequest(f"a block of the type {self.type} has no such field", param=f"{field}.{name}")
        for name in wanted[: REQUIRED[self.type]]:
            if getattr(self, name) is None:
                raise InvalidRequest("this field is required", param=f"{field}.{name}")


FIELDS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking", "signature"),
}
REQUIRED = {"text": 1, "tool_use": 3, "tool_result": 1, "thinking": 1}  # how many of these, from the first on


def text_of(content: str | list[Block] | None, field: str) -> str:
    """The text of blocks that may only be text."""
    if not isinstance(content, list):
        return content or ""
    for i, block in enumerate(content):
        block.check(f"{field}.{i}")
        if block.type != "text":
            raise InvalidRequest("only blocks of text can stand here", param=f"{field}.{i}.type")
    return "\n".join(block.text or "" for block in content)


class Message(Strict):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    def rendered(self, field: str) -> list[dict[str, Any]]:
        """As chat templates take it: results of tools are messages of their own, before what the user says."""
        if isinstance(self.content, str):
            messages = [{"role": self.role, "content": self.content}]
        else:
            for i, block in enumerate(self.content):
                block.check(f"{field}.content.{i}")
            messages = self._assistant(field) if self.role == "assistant" else self._user(field)
        check_text(messages, field)
        return messages

    def _assistant(self, field: str) -> list[dict[str, Any]]:
        assert isinstance(self.content, list)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(b.text or "" for b in self.content if b.type == "text")}
        thoughts = [b.thinking or "" for b in self.content if b.type == "thinking"]
        if any(thoughts):
            message["reasoning_content"] = "\n".join(thoughts)
        calls = []
        for i, block in enumerate(self.content):
            if block.type == "tool_result":
                raise InvalidRequest("only the user has results of tools", param=f"{field}.content.{i}.type")
            if block.type == "tool_use":
                check_text(block.input, f"{field}.content.{i}.input")
                arguments = parse_arguments(json_text(block.input or {}, f"{field}.content.{i}.input"))
                calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        return [{**message, "tool_calls": calls} if calls else message]

    def _user(self, field: str) -> list[dict[str, Any]]:
        assert isinstance(self.content, list)
        results, said = [], []
        for i, block in enumerate(self.content):
            if block.type == "tool_result":
                text = text_of(block.content, f"{field}.content.{i}.content")
                results.append({"role": "tool", "content": f"Error: {text}" if block.is_error else text, "tool_call_id": block.tool_use_id})
            elif block.type == "text":
                said.append(block.text or "")
            else:
                raise InvalidRequest("only the assistant thinks and uses tools", param=f"{field}.content.{i}.type")
        return [*results, *([{"role": "user", "content": "\n".join(said)}] if said or not results else [])]


def json_text(value: dict[str, Any], field: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"this is no JSON: {error}", param=field) from error


class ToolField(Strict):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def rendered(self, field: str) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        check_text(function, field)
        return {"type": "function", "function": function}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Strict):
    user_id: str | None = None


class Thinking(Strict):
    """A model thinks or not, as its template has it; no budget could be kept."""

    type: Literal["disabled"]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Annotated[Any, only()] = None

    def form(self) -> Form | None:
        if self.format is None:
            return None
        check_text(self.format.schema_, "output_config.format.schema")
        return Form(self.format.schema_, "output_config.format.schema")


class CountRequest(Strict):
    """What counts as input."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[ToolField] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    agent_id: str | None = None

    def chat(self) -> Chat:
        messages = [m for i, message in enumerate(self.messages) for m in message.rendered(f"messages.{i}")]
        system = text_of(self.system, "system")
        check_text(system, "system")
        if system:
            messages.insert(0, {"role": "system", "content": system})
        last = messages[-1]
        go_on = last["role"] == "assistant"  # the answer's beginning is given
        if go_on and "tool_calls" in last:
            raise InvalidRequest("the results of its tools must follow", param=f"messages.{len(self.messages) - 1}")
        return Chat(messages, [tool.rendered(f"tools.{i}") for i, tool in enumerate(self.tools or [])], go_on)

    def ask(self, agent: str | None) -> Ask:
        tools, choice = self.called()
        return Ask(self.chat(), agent, Sampling(), None, tools=tools, choice=choice, model=self.model)

    def called(self) -> tuple[tuple[Tool, ...], Choice]:
        """The tools that may be called, and whether they must be."""
        tools = tuple(Tool(t.name, t.input_schema, bool(t.strict), f"tools.{i}.input_schema") for i, t in enumerate(self.tools or []))
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("two tools have one name", param="tools")
        wanted = self.tool_choice or ToolChoice(type="auto")
        if (wanted.name is not None) != (wanted.type == "tool"):
            raise InvalidRequest("a name is given with the type tool, and only with it", param="tool_choice.name")
        if not tools and wanted.type in ("any", "tool"):
            raise InvalidRequest("there are no tools to choose from", param="tool_choice")
        if wanted.name is not None:
            tools = tuple(tool for tool in tools if tool.name == wanted.name)
            if not tools:
                raise InvalidRequest(f"no tool is called {wanted.name!r}", param="tool_choice.name")
        mode = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}[wanted.type]
        return tools, Choice(mode, not wanted.disable_parallel_tool_use and wanted.name is None)  # type: ignore[arg-type]


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Stops | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    # no-ops
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def ask(self, agent: str | None) -> Ask:
        tools, choice = self.called()
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
        )
        form = self.output_config.form() if self.output_config is not None else None
        if form is not None and tools and choice.mode != "none":
            raise InvalidRequest("an answer has this form, or uses tools: set tool_choice to none", param="output_config.format")
        return Ask(
            self.chat(),
            agent,
            sampling,
            self.max_tokens,
            stop=stops(self.stop_sequences),
            tools=tools,
            choice=choice,
            form=form,
            model=self.model,
        )
