"""Teams of agents: who speaks when, who hears what, and what is remembered from phase to phase.

Speaks to a server as any client does: plain chat completions with the whole message list.
"""

from rewake.workflows.agent import Agent, Answer
from rewake.workflows.play import Play, read_texts
from rewake.workflows.record import Record, Turn
from rewake.workflows.scenario import Phase, Scenario, read_scenario

__all__ = ["Agent", "Answer", "Phase", "Play", "Record", "Scenario", "Turn", "read_scenario", "read_texts"]
