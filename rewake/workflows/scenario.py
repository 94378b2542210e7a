"""A scenario: who takes part, in which rooms they talk, and in which phases. Read from YAML; what is wrong is named by its place."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from rewake.errors import ConfigError

__all__ = ["Order", "Person", "Phase", "Room", "Scenario", "read_scenario"]

Order = Literal["round_robin", "moderator", "broadcast"]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Limit = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Person(Part):
    """Someone who speaks. `called` is the name others hear; `text` and `file` (in the directory of texts) follow the instructions."""

    instructions: Text
    called: Text | None = None
    about: str = ""  # what it knows: by this it is chosen where a moderator names too few
    file: str | None = None
    max_tokens: Limit | None = None


class Room(Part):
    """Where things are said. Of a public room minutes are kept, which who comes later reads; of a private one nothing is left."""

    private: bool = False


class Phase(Part):
    """`speakers` talk in a room, in an order, for some rounds. Each of `questions` begins a round, said by `asker`.

    `order` is a name of one, or says who speaks when. `present` listen only. `reads` gives the minutes of other rooms to somebody.
    With `apart`, speakers are alone with the moderator and those who listen: they hear the questions, but not each other.
    """

    name: Text
    room: Name
    speakers: list[Name] = Field(min_length=1)
    present: list[Name] = []
    order: Order | list[Name] = "round_robin"
    moderator: Name | None = None
    asks: Limit = 1  # how many a moderator calls up each round
    apart: bool = False
    rounds: Limit = 1
    questions: list[Text] = []
    asker: Text = "Visitor"
    cue: str = ""
    reads: dict[Name, list[Name]] = {}

    @property
    def there(self) -> list[str]:
        """Everybody who hears what is said."""
        return list(dict.fromkeys([*self.speakers, *self.present, *([self.moderator] if self.moderator else [])]))

    def with_whom(self, name: str) -> list[str]:
        """Who hears what `name` says, and is heard by it."""
        others = [other for other in self.there if other != name]
        return [other for other in others if other not in self.speakers] if self.apart and name in self.speakers else others

    @property
    def num_rounds(self) -> int:
        return len(self.questions) or self.rounds

    @model_validator(mode="after")
    def orders_fit(self) -> Phase:
        if (self.order == "moderator") != (self.moderator is not None):
            raise ValueError("a moderator is named for the order `moderator`, and for no other")
        if self.apart and self.order not in ("moderator", "broadcast"):
            raise ValueError("apart: this is for the orders `moderator` and `broadcast`")
        if self.moderator in self.speakers:
            raise ValueError("moderator: the moderator calls up the speakers, and is none of them")
        if isinstance(self.order, list) and (strangers := set(self.order) - set(self.speakers)):
            raise ValueError(f"order: {', '.join(sorted(strangers))} is not among the speakers")
        if isinstance(self.order, list) and not self.order:
            raise ValueError("order: it names nobody")
        if self.order == "moderator" and self.asks > len(self.speakers):
            raise ValueError(f"asks: {self.asks} of {len(self.speakers)} speakers cannot be called up")
        if self.questions and self.rounds != 1:
            raise ValueError("rounds: there is one round for each question")
        return self


class Scenario(Part):
    """The whole. `agents` and `rooms` by name."""

    title: Text
    opening: str = ""  # told to everybody, behind their instructions
    agents: dict[Name, Person] = Field(min_length=1)
    rooms: dict[Name, Room] = Field(min_length=1)
    phases: list[Phase] = Field(min_length=1)
    max_tokens: Limit = 120
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0  # small models repeat themselves without

    @model_validator(mode="after")
    def names_are_known(self) -> Scenario:
        for number, phase in enumerate(self.phases):
            self._must_know("agents", f"phases.{number}", *phase.there, *phase.reads)
            self._must_know("rooms", f"phases.{number}.room", phase.room)
            for reader, rooms in phase.reads.items():
                where = f"phases.{number}.reads.{reader}"
                self._must_know("rooms", where, *rooms)
                if reader not in phase.there:
                    raise ValueError(f"{where}: only who is there reads")
                if private := [room for room in rooms if self.rooms[room].private]:
                    raise ValueError(f"{where}: {private[0]!r} is private, and keeps no minutes")
        twice = [name for name, n in Counter(self.called(agent).casefold() for agent in self.agents).items() if n > 1]
        if twice:
            raise ValueError(f"agents: two are called {twice[0]!r}")
        return self

    def _must_know(self, what: Literal["agents", "rooms"], where: str, *names: str) -> None:
        known = getattr(self, what)
        if strangers := [name for name in names if name not in known]:
            raise ValueError(f"{where}: there is no {what[:-1]} {strangers[0]!r}; there are {', '.join(known)}")

    def called(self, agent: str) -> str:
        return self.agents[agent].called or agent.replace("_", " ").capitalize()

    @property
    def files(self) -> list[str]:
        return [person.file for person in self.agents.values() if person.file is not None]


class Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, as the first of the two would be lost."""


def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands here twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def read_scenario(path: Path) -> Scenario:
    """Raises ConfigError that names the file, and the line or the field."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader)
        data = yaml.load(text, Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{mark}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[constrained-str]"))
        message = first["msg"].removeprefix("Value error, ")
        line = line_of(root, first["loc"])
        raise ConfigError(f"{path}:{line}: {at + ': ' if at else ''}{message}") from error


def line_of(node: yaml.Node | None, place: tuple[int | str, ...]) -> int:
    """The line of the innermost part of `place` that is there."""
    line = node.start_mark.line + 1 if node is not None else 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
