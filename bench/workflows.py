"""Teams of agents over phases: with memory from phase to phase, and with all memory cleared before each phase.

  persistent   cleared once, at the start
  cleared      all agents are forgotten before each phase; inside a phase, memory is used (the paper's "cold")

Every turn has 150 tokens, in both modes the same ones: what is said in the persistent mode, sampled greedily, is the script of the
cleared mode; what an agent says there is counted as equal or not, and replaced by the script. Stop tokens are never sampled.

The interrogation (examples/scenarios): five phases, 25 turns, four agents. Wall times are of whole turns, and of turns until their 20th
piece of text is there, which is what is waited for with answers of 20 tokens.

The experts: nine with an article of 3,000 words each, who answer for themselves, one after the other. Whom the router calls up is given
by a grammar with one sentence in it: the names of the two who know most about the question. Between the reading and the questions, the
server is killed and started anew, so that persistent experts are woken from disk. Compared are the same calls in both modes: the
first one of each expert in a phase. Reading is the same in both, and is done once.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.common import Bar, finish, flags, table
from rewake.client import Client
from rewake.models import resolve
from rewake.text.tokenizer import Tokenizer
from rewake.workflows import Agent, Answer, Phase, Play, Record, Scenario, Turn, read_scenario, read_texts
from rewake.workflows.orders import called_up

SCENARIOS = Path(__file__).parents[1] / "examples" / "scenarios"
MODELS = ("smollm2-135m", "gemma3-270m")
MODES = ("persistent", "cleared")
SPOKEN, SHORT = 150, 20  # tokens of a turn, and of one that would be short
READING, QUESTIONS, DEFINITIONS = "Reading", "Questions", "Definitions"
ROUTER = "router"
PLAIN = """\
{{- bos_token }}
{%- for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"""
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

    def warm_up(self) -> None:
        """The first request of a server pays for memory that nobody has touched yet, which is none of a mode's doing."""
        with Client(self.url) as client:
            body = {"model": client.model(), "prompt": "Good morning. " * 100, "max_tokens": SHORT}
        httpx.post(f"{self.url}/v1/completions", json=body, timeout=600).raise_for_status()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def clear(self) -> None:
        with Client(self.url) as client:
            for agent in client.list():
                client.forget(agent["agent"])


class Script:
    """Has agents speak, always as many tokens; with `lines`, those are what is said instead. The router calls up who is in `calls`."""

    def __init__(self, model: Path, lines: Sequence[str] = (), calls: Sequence[str] = ()) -> None:
        self.fields = {"max_tokens": SPOKEN, "logit_bias": {str(token): -100 for token in Tokenizer(model).stop_ids(model)}}
        self.calls = [{"response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": {"const": c}}}} for c in calls]
        self.lines = list(lines)
        self.num_equal = 0
        self.short: list[float] = []  # seconds of each turn, until a short one would have ended

    async def __call__(self, agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
        started, came = time.perf_counter(), []
        fields = self.calls.pop(0) if agent.name == ROUTER else self.fields
        answer = await agent.say(cue, on_piece=lambda _: came.append(time.perf_counter() - started), **fields)
        line = self.lines[len(self.short)] if self.lines else answer.text
        self.num_equal += answer.text == line
        self.short.append(came[SHORT - 1] if len(came) >= SHORT else answer.seconds)
        agent.messages[-1]["content"] = line
        return replace(answer, text=line)


def calm(scenario: Scenario) -> Scenario:
    """Greedily, without penalties, and whatever is read at once read one after the other."""
    phases: list[Phase] = []
    for phase in scenario.phases:
        if phase.order == "broadcast":
            one = {"order": "round_robin"}
            phases += [phase.model_copy(update={**one, "speakers": [speaker]}) for speaker in phase.speakers]
        else:
            phases.append(phase)
    return scenario.model_copy(update={"phases": phases, "temperature": 0.0, "frequency_penalty": 0.0})


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
    server: Server, mode: str, scenario: Scenario, texts: dict[str, str], voice: Script, known: Sequence[Turn] = (), killed_before: str = ""
) -> tuple[list[Turn], float]:
    """The turns, and the seconds they took together. `known` ones have been said already, and nobody is asked for them."""
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
        record = Record(None, scenario)
        record.turns = [replace(turn, recorded=True) for turn in known]
        play = Play(scenario, client, texts=texts, record=record, voice=voice, on_phase=before)
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


def calls(scenario: Scenario) -> list[str]:
    """Whom the router names for each question: those who know most about it. (Small models name the same two each time.)"""
    phase = next(phase for phase in scenario.phases if phase.moderator == ROUTER)
    names = {name: scenario.called(name) for name in phase.speakers}
    about = {name: scenario.agents[name].about for name in phase.speakers}
    return [", ".join(names[name] for name in called_up("", names, phase.asks, question, about)) for question in phase.questions]


def means(turns: Sequence[Turn]) -> dict[str, float]:
    """The time to the first token; tokens of the prompts, and of those, computed and read from disk."""
    tokens = {what: statistics.mean(turn.answer.report[f"{what}_tokens"] for turn in turns) for what in ("prompt", "computed", "loaded")}
    return {"ms": statistics.mean(map(ttft, turns)), **tokens}


def compared(model: str, phase: str, seen: dict[str, list[dict[str, float]]]) -> Row:
    """A row: means of the same turns in both modes, for each repetition."""
    cold, kept = (statistics.median(found["ms"] for found in seen[mode]) for mode in ("cleared", "persistent"))
    tokens = seen["persistent"][-1]
    row = {"model": model, "phase": phase, "prompt": tokens["prompt"], "new": tokens["computed"], "from disk": tokens["loaded"]}
    return {**row, "cleared ms": cold, "persistent ms": kept, "x": cold / kept}


def interrogation(model: str, path: Path, server: Server, repetitions: int) -> tuple[list[Row], list[Bar]]:
    scenario = calm(read_scenario(SCENARIOS / "interrogation.yaml"))
    phases = [phase.name for phase in scenario.phases]
    seen: dict[str, dict[str, list[dict[str, float]]]] = {phase: {mode: [] for mode in MODES} for phase in phases}
    walls: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}  # of whole turns, and of short ones
    shares, equal = [], []
    server.warm_up()
    for _ in range(repetitions):
        lines: list[str] = []
        for mode in MODES:
            voice = Script(path, lines)
            turns, wall = perform(server, mode, scenario, {}, voice)
            walls[mode].append((wall, sum(voice.short)))
            print(f"{model}: interrogation, {mode}: {wall:.0f} s", file=sys.stderr)
            if mode == "persistent":
                lines = [turn.answer.text for turn in turns]
                shares.append(extended(turns))
            else:
                equal.append(voice.num_equal)
            for number, phase in enumerate(phases):
                seen[phase][mode].append(means([turn for turn in turns if turn.phase == number]))
    rows = [compared(model, phase, seen[phase]) for phase in phases]
    for what, tokens in enumerate((SPOKEN, SHORT)):
        cold, kept = (1000 * statistics.median(wall[what] for wall in walls[mode]) for mode in ("cleared", "persistent"))
        rows.append({"model": model, "phase": f"wall, {tokens} tokens", "cleared ms": cold, "persistent ms": kept, "x": cold / kept})
    print(f"{model}: {min(equal)} of 25 turns said alike in both modes; EXTEND {min(shares):.0%} of turns after an agent's first")
    bars = [
        Bar("interrogation", f"{model}: EXTEND share", min(shares), 1),
        Bar("interrogation", f"{model}: last phase, cleared / persistent", rows[len(phases) - 1]["x"], 5),
        Bar("interrogation", f"{model}: wall time saved, answers of {SHORT} tokens", 1 - 1 / rows[-1]["x"], 0.4),
    ]
    return rows, bars


def experts(model: str, path: Path, server: Server, folder: Path, repetitions: int, most: int) -> tuple[list[Row], list[Bar]]:
    whole = read_scenario(SCENARIOS / "experts.yaml")
    texts = read_texts(whole, folder)
    scenario = calm(few(whole, most))
    called = calls(scenario)
    names = [phase.name for phase in scenario.phases]
    phases = (READING, QUESTIONS, DEFINITIONS)
    seen: dict[str, dict[str, list[dict[str, float]]]] = {phase: {mode: [] for mode in MODES} for phase in phases}
    shares, equal = [], []
    for _ in range(repetitions):
        voice = Script(path, calls=called)
        turns = {"persistent": perform(server, "persistent", scenario, texts, voice, killed_before=QUESTIONS)[0]}
        shares.append(extended(turns["persistent"]))
        read = [turn for turn in turns["persistent"] if names[turn.phase] == READING]
        voice = Script(path, [turn.answer.text for turn in turns["persistent"][len(read) :]], called)
        turns["cleared"], _ = perform(server, "cleared", scenario, texts, voice, known=read, killed_before=QUESTIONS)
        equal.append(voice.num_equal / len(voice.lines))
        for phase in phases:
            for mode in MODES:
                seen[phase][mode].append(means(list(first_calls(turns[mode], names, phase, but=ROUTER).values())))
        print(f"{model}: experts, persistent and cleared", file=sys.stderr)
    rows = [compared(model, phase, seen[phase]) for phase in phases]
    print(f"{model}: {min(equal):.0%} of turns said alike in both modes; EXTEND {min(shares):.0%} of turns after an agent's first")
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
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (both; the first with --quick)")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N", help="of which medians are taken (%(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the server goes, too
    rows: list[Row] = []
    bars: list[Bar] = []
    models = args.model or (MODELS[:1] if args.quick else MODELS)
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            path = served_model(model, Path(folder))
            server = Server(str(path), Path(folder) / "data")
            try:
                parts = [interrogation(model, path, server, args.repetitions)]
                table(parts[0][0])
                if args.articles:
                    parts.append(experts(model, path, server, args.articles, args.repetitions, 3 if args.quick else 9))
                    table(parts[1][0])
            finally:
                server.kill()
        for made, reached in parts:
            rows += made
            bars += reached
    if not args.articles:
        bars += [Bar("experts", f"{model}: not measured: name --articles", float("nan"), 24) for model in models]
    return finish("workflows", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
