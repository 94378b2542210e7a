"""What can be asked for in OpenAI's protocol. Every field is obeyed, a documented no-op, or refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rewake.api.fields import Stops, Strict, Text, check_text, only, stops
from rewake.api.generation import Ask, Chat, Form
from rewake.errors import InvalidRequest
from rewake.request import Sampling
from rewake.text.toolcalls import parse_arguments
from rewake.text.tools import Choice, Tool

__all__ = ["ChatRequest", "CompletionRequest"]

MOST_ANSWERS = 16
MOST_TOOLS = 128
MOST_DIGITS = 9  # of a token
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str = Field(min_length=1)
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # as streams have it

    def rendered(self, field: str) -> dict[str, Any]:
        try:
            arguments = parse_arguments(self.function.arguments)
        except ValueError as error:
            raise InvalidRequest(f"the arguments of a call are the text of a JSON object: {error}", param=f"{field}.arguments") from error
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """`developer` is what newer clients call `system`. `reasoning_content` is what the model thought, as answers have it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # what clients send back from an answer; only what means "none"
    name: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None

    def rendered(self, field: str) -> dict[str, Any]:
        """As chat templates take it. `field` is what the message is called in errors."""
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("only the assistant calls tools", param=f"{field}.tool_calls")
        if self.reasoning_content and self.role != "assistant":
            raise InvalidRequest("only the assistant has reasoning", param=f"{field}.reasoning_content")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest("messages of the role tool, and only they, name the call they answer", param=f"{field}.tool_call_id")
        if self.content is None and not self.tool_calls:
            raise InvalidRequest("a message has content; only a call of tools may be without", param=f"{field}.content")
        content = "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.rendered(f"{field}.tool_calls.{i}.function") for i, call in enumerate(self.tool_calls)]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        check_text(message, field)
        return message


class Function(Strict):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function

    def rendered(self, field: str) -> dict[str, Any]:
        function = self.function.model_dump(exclude={"strict"})
        check_text(function, field)
        return {"type": "function", "function": function}


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> Form | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest("json_schema is given with the type json_schema, and only with it", param="response_format.json_schema")
        if self.json_schema is not None:
            check_text(self.json_schema.schema_, "response_format.json_schema.schema")
            return Form(self.json_schema.schema_, "response_format.json_schema.schema")
        return Form({"type": "object"}, "response_format") if self.type == "json_object" else None


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampled(Strict):
    """What chats and completions have in common. Fields that take one value are accepted because clients send them."""

    model: str
    agent_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - MOST_ANSWERS)
    timeout: float | None = Field(None, gt=0)  # ours: seconds until the request is given up
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: Text | Stops | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    # no-op: it asks for nothing that could be done differently here
    user: str | None = None

    def sampling(self, logprobs: int | None) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.biases(),
            logprobs=logprobs,
        )

    def biases(self) -> tuple[tuple[int, float], ...]:
        found = {}
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= MOST_DIGITS and -100 <= bias <= 100):
                raise InvalidRequest("it maps token ids to biases from -100 to 100", param="logit_bias")
            found[int(token)] = float(bias)
        return tuple(sorted(found.items()))

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options are for streams: set stream, too", param="stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        if self.stop == "":
            raise InvalidRequest("a stop string has at least one character", param="stop")
        return stops(self.stop)


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # no-ops
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def ask(self, agent: str | None) -> Ask:
        self.check_stream()
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs are for logprobs: set logprobs, too", param="top_logprobs")
        tools, choice = self.called()
        form = self.response_format.form() if self.response_format is not None else None
        if form is not None and tools and choice.mode != "none":
            raise InvalidRequest("an answer cannot both have this form and call tools: set tool_choice to none", param="response_format")
        return Ask(
            prompt=Chat(
                [message.rendered(f"messages.{i}") for i, message in enumerate(self.messages)],
                [tool.rendered(f"tools.{i}") for i, tool in enumerate(self.tools or [])],
            ),
            agent=agent,
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            timeout=self.timeout,
            n=self.n or 1,
            stop=self.stops(),
            tools=tools,
            choice=choice,
            form=form,
            model=self.model,
        )

    def called(self) -> tuple[tuple[Tool, ...], Choice]:
        """The tools that may be called, and whether they must be."""
        tools = tuple(
            Tool(t.function.name, t.function.parameters, bool(t.function.strict), f"tools.{i}.function.parameters")
            for i, t in enumerate(self.tools or [])
        )
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("two tools have one name", param="tools")
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            named = tuple(tool for tool in tools if tool.name == name)
            if not named:
                raise InvalidRequest(f"no tool is called {name!r}", param="tool_choice")
            return named, Choice("required", False)
        if not tools and self.tool_choice not in (None, "none"):
            raise InvalidRequest("there are no tools to choose from", param="tool_choice")
        return tools, Choice(self.tool_choice or "auto", parallel)


class CompletionRequest(Sampled):
    """Text that is gone on with, as it is: no chat template."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None

    def asks(self, agent: str | None) -> list[Ask]:
        """One for each prompt."""
        self.check_stream()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("not supported: all answers are returned", param="best_of")
        prompts = self.prompts()
        if not prompts:
            raise InvalidRequest("there is no prompt", param="prompt")
        if len(prompts) * (self.n or 1) > MOST_ANSWERS:
            raise InvalidRequest(f"these are more than {MOST_ANSWERS} answers", param="prompt")
        if len(prompts) > 1 and agent is not None:
            raise InvalidRequest("an agent goes on with one prompt", param="prompt")
        sampling = self.sampling(self.logprobs)
        stop = self.stops()
        # as OpenAI documents it: a completion is short unless more is asked for
        most, n = self.max_tokens or 16, self.n or 1
        return [Ask(prompt, agent, sampling, most, self.timeout, n, stop, model=self.model) for prompt in prompts]

    def prompts(self) -> list[str | tuple[int, ...]]:
        check_text(self.prompt, "prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(token, int) for token in self.prompt):
            return [tuple(self.prompt)]  # type: ignore[arg-type]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt]  # type: ignore[arg-type]
