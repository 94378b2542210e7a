"""Recordings that span killed processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from rewake.replay import Recorder, num_pages, replay
from tests.fakes import EchoBackend, EngineHarness
from tests.test_engine import prompt


def test_a_recording_goes_on_from_what_a_killed_process_had_saved(tmp_path: Path) -> None:
    """Its page had settled, and half a line was written; the next process knows neither."""
    recording = tmp_path / "steps.jsonl"

    recorders = []

    def start(name: str) -> EngineHarness:
        recorders.append(Recorder(recording))
        return EngineHarness(tmp_path / name, trace=recorders[-1].event, step_trace=recorders[-1].step)

    before = start("data")
    text = prompt(250)
    text += before.ask(text, "a").tokens
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    before.ask([*text, *prompt(40, seed=1)], "a")
    before.close()
    with open(recording, "a") as file:
        file.write('{"step": [[[1, 2')
    after = start("killed")
    again = after.ask([*text, *prompt(50, seed=2)], "a")
    assert again.match.kind == "extend"
    after.close()
    for recorder in recorders:
        recorder.close()
    steps = list(replay(recording, EchoBackend(num_pages(recording))))
    assert len(steps) == 3 * 4 and all(step.same for step in steps)
