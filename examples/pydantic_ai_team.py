"""Two agents of Pydantic AI on one Rewake server: a writer and an editor, each with a memory of its own.

    pip install "pydantic-ai-slim[openai]"
    make serve                                   # in another terminal
    python examples/pydantic_ai_team.py

All that is ours is a header: it says whose memory a request is. The framework sends the whole history each turn; what is remembered
of it is not computed again, and the usage it reports says so.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

ROUNDS = 3
INSTRUCTIONS = {
    "writer": "You write one short paragraph of a story about a lighthouse. You take the editor's advice.",
    "editor": "You are an editor. You give one short piece of advice on the last paragraph you were shown.",
}


def team(client: AsyncOpenAI, model: str) -> dict[str, Agent]:
    provider = OpenAIProvider(openai_client=client)
    return {
        name: Agent(
            OpenAIChatModel(model, provider=provider),
            instructions=instructions,
            model_settings=ModelSettings(temperature=0.0, max_tokens=60, extra_headers={"X-Agent-ID": f"team/{name}"}),
        )
        for name, instructions in INSTRUCTIONS.items()
    }


async def work(url: str, model: str = "smollm2-135m", rounds: int = ROUNDS) -> list[tuple[str, int, int]]:
    """Who spoke, with how many prompt tokens, and how many of these were remembered."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        return await talk(team(client, model), rounds)


async def talk(agents: dict[str, Agent], rounds: int) -> list[tuple[str, int, int]]:
    histories: dict[str, Sequence[ModelMessage]] = {name: [] for name in agents}
    said, turns = "Begin the story.", []
    for _ in range(rounds):
        for name, agent in agents.items():
            result = await agent.run(said, message_history=histories[name])
            histories[name], said = result.all_messages(), result.output
            usage = result.usage
            turns.append((name, usage.input_tokens, usage.cache_read_tokens))
            print(f"{name}: {said}\n  [{usage.cache_read_tokens} of {usage.input_tokens} prompt tokens were remembered]\n")
    return turns


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
