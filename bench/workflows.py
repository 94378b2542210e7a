"""Teams of agents over phases: with memory from phase to phase, and with all memory cleared before each phase.

The interrogation (examples/scenarios): five phases, 25 turns, four agents. Of each turn 20 tokens are sampled, greedily; the turn is then
filled with a scripted text up to 150 tokens, for the speaker as for those who hear it. So the speaker computes the other 130 as part of
its next prompt, as it would a history that somebody else replays. Both modes are given the same script, and as sampling is greedy, they
say the same as far as they compute the same (the table counts the turns that are equal).

The experts: nine with an article of 3,000 words each, who answer for themselves (20 tokens), one after the other. Between the reading
and the questions, the server is killed and started anew, so that persistent experts are woken from disk. Compared are the same calls in
both modes: the first one of each expert in the phase of the questions.

  persistent   cleared once, at the start
  cleared      all agents are forgotten before each phase; inside a phase, memory is used (the paper's "cold")

Everything goes through HTTP, to a server process of its own; the list of messages is sent whole. TTFT is from sending to the first piece
of text. Times of a phase are means over its turns (as in the paper), then medians of interleaved repetitions; clearing and starting
are in no time. SmolLM2-135M has a chat template. Gemma 3 270M is a base model and has none: it is given a plain one, turns between the
marks its vocabulary has for them, the system message at the head of the first question.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.common import Bar, finish, flags, table
from rewake.client import Client
from rewake.models import resolve
from rewake.text.tokenizer import Tokenizer
from rewake.workflows import Agent, Answer, Phase, Play, Scenario, Turn, read_scenario, read_texts

Voice = Callable[[Agent, str, Callable[[str], object]], Awaitable[Answer]]
SCENARIOS = Path(__file__).parents[1] / "examples" / "scenarios"
MODELS = ("smollm2-135m", "gemma3-270m")
MODES = ("persistent", "cleared")
SAMPLED, SPOKEN = 20, 150  # tokens of a turn: answered, and in all
READING, QUESTIONS, DEFINITIONS = "Reading", "Questions", "Definitions"
PLAIN = """\
{{- bos_token }}
{%- for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"""
SCRIPT = """I have thought about it, and it is as I have said before: the lamp in the corridor was out, the door at the end of it stood
open, and somebody had walked through the wet grass towards the wall. I counted the steps, I heard the bell, and I went back to where I
was told to stay. If you ask me once more I will say the same, for there is nothing else that I could add to it; but ask the others, too,
and compare what they tell you with the list on the wall, with the hours in the book, and with what the guard has written down that
night. """
Row = dict[str, Any]


class Server:
    """`rewake serve` in a process of its own."""

    def __init__(self, model: str, data: Path) -> None:
        self.model = model
        self.data = data
        self.start()

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "rewake", "serve", "--model", self.model, "--data", str(self.data), "--port", str(port)]
        with open(self.data.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen([*command, "--log-level", "warning"], stdout=log, stderr=log)
        while self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/health").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise SystemExit(f"the server did not start: {self.data.with_suffix('.log').read_text()[-2000:]}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def clear(self) -> None:
        with Client(self.url) as client:
            for agent in client.list():
                client.forget(agent["agent"])


class Script:
    """Has agents speak: a sampled beginning, then the script. Counts tokens as the model's tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def __call__(self, agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
        answer = await agent.say(cue, on_piece=on_piece)
        if answer.finish_reason != "length":  # it has ended: nothing can be put behind it
            return answer
        missing = SPOKEN - len(self.tokenizer.encode(answer.text))
        rest = self.tokenizer.decode(self.tokenizer.encode(" " + " ".join((SCRIPT * 3).split()))[:missing])
        agent.messages[-1]["content"] = answer.text + rest
        return replace(answer, text=answer.text + rest)


async def say(agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
    return await agent.say(cue, on_piece=on_piece)


def short(scenario: Scenario) -> Scenario:
    """With answers of 20 tokens, greedily, and whatever is read at once read one after the other."""
    people = {name: person.model_copy(update={"max_tokens": SAMPLED}) for name, person in scenario.agents.items()}
    phases: list[Phase] = []
    for phase in scenario.phases:
        if phase.order == "broadcast":
            one = {"order": "round_robin"}
            phases += [phase.model_copy(update={**one, "speakers": [speaker]}) for speaker in phase.speakers]
        else:
            phases.append(phase)
    return scenario.model_copy(update={"agents": people, "phases": phases, "temperature": 0.0})


def few(scenario: Scenario, most: int) -> Scenario:
    """With so many experts, and as many questions as half of them."""
    gone = list(scenario.agents)[1 + most :]
    phases = [
        phase.model_copy(
            update={"speakers": [name for name in phase.speakers if name not in gone], "questions": phase.questions[: (most + 1) // 2]},
        )
        for phase in scenario.phases
    ]
    return scenario.model_copy(update={"phases": phases})


def perform(
    server: Server, mode: str, scenario: Scenario, texts: dict[str, str], voice: Voice, killed_before: str = ""
) -> tuple[list[Turn], float]:
    """The turns, and the seconds they took together."""
    names = [phase.name for phase in scenario.phases]
    pauses = 0.0

    def before(number: int, phase: Phase) -> None:
        nonlocal pauses
        started = time.perf_counter()
        begins = number == 0 or names[number - 1] != phase.name
        if begins and phase.name == killed_before:
            server.kill()
            server.start()
            again = Client(server.url)
            for agent in play.agents.values():
                agent.client = again
        if number == 0 or (mode == "cleared" and begins):
            server.clear()
        pauses += time.perf_counter() - started

    async def run() -> list[Turn]:
        return [turn async for turn in play.run()]

    with Client(server.url) as client:
        play = Play(scenario, client, texts=texts, voice=voice, on_phase=before)
        model = client.model()
        for agent in play.agents.values():
            agent.model = model
        started = time.perf_counter()
        turns = asyncio.run(run())
        return turns, time.perf_counter() - started - pauses


def first_calls(turns: Sequence[Turn], names: Sequence[str], phase: str, but: str = "") -> dict[str, Turn]:
    """The first turn of everybody in the phase of that name."""
    found: dict[str, Turn] = {}
    for turn in turns:
        if names[turn.phase] == phase and turn.speaker != but:
            found.setdefault(turn.speaker, turn)
    return found


def ttft(turn: Turn) -> float:
    """In milliseconds; the whole time for a turn that said nothing."""
    return 1000 * (turn.answer.seconds if turn.answer.ttft is None else turn.answer.ttft)


def extended(turns: Sequence[Turn]) -> float:
    """The share of turns after an agent's first that extended what it remembered."""
    met, kinds = set(), []
    for turn in turns:
        if turn.speaker in met:
            kinds.append(turn.answer.report["match"] == "extend")
        met.add(turn.speaker)
    return sum(kinds) / len(kinds)


def interrogation(model: str, server: Server, tokenizer: Tokenizer, repetitions: int) -> tuple[list[Row], list[Bar]]:
    scenario = short(read_scenario(SCENARIOS / "interrogation.yaml"))
    times: dict[tuple[str, int], list[float]] = {}
    walls: dict[str, list[float]] = {mode: [] for mode in MODES}
    shares, tokens, same = [], {}, []
    for repetition in range(repetitions):
        turns = {}
        for mode in MODES:
            turns[mode], wall = perform(server, mode, scenario, {}, Script(tokenizer))
            walls[mode].append(wall)
            for phase in range(len(scenario.phases)):
                own = [turn for turn in turns[mode] if turn.phase == phase]
                times.setdefault((mode, phase), []).append(statistics.mean(map(ttft, own)))
                tokens[phase] = statistics.mean(turn.answer.report["prompt_tokens"] for turn in own)
        shares.append(extended(turns["persistent"]))
        same.append(sum(a.answer.text == b.answer.text for a, b in zip(*turns.values(), strict=True)))
        print(f"{model}: interrogation {repetition + 1} of {repetitions}", file=sys.stderr)
    rows = []
    for number, phase in enumerate(scenario.phases):
        cold, kept = (statistics.median(times[mode, number]) for mode in ("cleared", "persistent"))
        row = {"model": model, "phase": phase.name, "prompt": tokens[number], "cleared ms": cold, "persistent ms": kept}
        rows.append({**row, "x": cold / kept})
    cold, kept = (statistics.median(walls[mode]) for mode in ("cleared", "persistent"))
    rows.append(
        {"model": model, "phase": "wall time", "prompt": "", "cleared ms": 1000 * cold, "persistent ms": 1000 * kept, "x": cold / kept}
    )
    print(f"{model}: turns with equal texts in both modes: {min(same)} of 25; EXTEND {min(shares):.0%} of turns after an agent's first")
    bars = [
        Bar("interrogation", f"{model}: EXTEND share", min(shares), 1),
        Bar("interrogation", f"{model}: last phase, cleared / persistent", rows[-2]["x"], 5),
        Bar("interrogation", f"{model}: wall time saved", 1 - kept / cold, 0.4),
    ]
    return rows, bars


def experts(model: str, server: Server, folder: Path, repetitions: int, most: int) -> tuple[list[Row], list[Bar]]:
    whole = read_scenario(SCENARIOS / "experts.yaml")
    texts = read_texts(whole, folder)
    scenario = short(few(whole, most))
    names = [phase.name for phase in scenario.phases]
    times: dict[tuple[str, str], list[float]] = {}
    shares = []
    tokens = loaded = 0.0
    for repetition in range(repetitions):
        for mode in MODES:
            turns, _ = perform(server, mode, scenario, texts, say, killed_before=QUESTIONS)
            for phase in (READING, QUESTIONS, DEFINITIONS):
                calls = first_calls(turns, names, phase, but="router").values()
                times.setdefault((mode, phase), []).append(statistics.mean(map(ttft, calls)))
                if mode == "persistent" and phase == QUESTIONS:
                    tokens = statistics.mean(turn.answer.report["prompt_tokens"] for turn in calls)
                    loaded = statistics.mean(turn.answer.report["loaded_tokens"] for turn in calls)
            if mode == "persistent":
                shares.append(extended(turns))
        print(f"{model}: experts {repetition + 1} of {repetitions}", file=sys.stderr)
    rows: list[Row] = []
    for phase in (READING, QUESTIONS, DEFINITIONS):
        cold, kept = (statistics.median(times[mode, phase]) for mode in ("cleared", "persistent"))
        rows.append({"model": model, "phase": phase, "prompt": tokens, "cleared ms": cold, "persistent ms": kept, "x": cold / kept})
    print(f"{model}: of {tokens:.0f} prompt tokens, {loaded:.0f} came from disk in the phase of the questions")
    bars = [
        Bar("experts", f"{model}: EXTEND share", min(shares), 1),
        Bar("experts", f"{model}: questions, cleared / persistent (from disk)", rows[1]["x"], 24),
    ]
    return rows, bars


def served_model(model: str, folder: Path) -> Path:
    """The model's folder; with a plain chat template if it has none."""
    path = resolve(model)
    if Tokenizer(path).has_chat_template:
        return path
    made = folder / model
    shutil.copytree(path, made, copy_function=lambda source, target: Path(target).symlink_to(source))
    (made / "chat_template.jinja").write_text(PLAIN)
    return made


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--articles", type=Path, metavar="DIR", help="the experts' articles; without it, they are not measured")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (both)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the server goes, too
    repetitions = 1 if args.quick else 3
    rows: list[Row] = []
    bars: list[Bar] = []
    for model in args.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = served_model(model, Path(folder))
            server = Server(str(path), Path(folder) / "data")
            try:
                parts = [interrogation(model, server, Tokenizer(path), repetitions)]
                if args.articles:
                    table(parts[0][0])
                    parts.append(experts(model, server, args.articles, repetitions, 4 if args.quick else 9))
            finally:
                server.kill()
        for made, reached in parts:
            rows += made
            bars += reached
        table(parts[-1][0])
    if not args.articles:
        bars += [Bar("experts", f"{model}: not measured: name --articles", float("nan"), 24) for model in args.model or MODELS]
    return finish("workflows", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
