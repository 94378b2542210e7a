"""Tool calls: which way a model writes them, reading them as they come, and holding an answer to them.

Templates and vocabularies are real ones. Answers called hand-written are; others are what a template itself writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewake.errors import InvalidRequest
from rewake.text.grammar import Form, Grammars
from rewake.text.tokenizer import Tokenizer
from rewake.text.tools import Call, Choice, Tool, read
from rewake.text.tools.base import Dialect
from rewake.text.tools.hermes import Hermes
from rewake.text.tools.llama3 import Llama3
from rewake.text.tools.mistral import Mistral
from rewake.text.transcripts import Transcripts
from tests.llama_cpp import real_template, real_vocabulary
from tests.templates import with_template

PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": "Where."}, "days": {"type": "integer", "description": "For how long."}},
    "required": ["town"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}
HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
TEMPLATES = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
UNKNOWN = ["google-gemma-2-2b-it", "Qwen3-Coder", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "openai-gpt-oss-120b"]


def calling(arguments: dict[str, Any], name: str = "weather", content: str = "") -> dict[str, Any]:
    call = {"id": "callprobe", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def tokenizer_of(model: Path, name: str, folder: Path, special: tuple[str, ...] = ()) -> Tokenizer:
    """The default model's vocabulary with a real template, and with `special` tokens that the template's own has."""
    made = folder / f"{name}{len(special)}"
    if not made.is_dir():
        with_template(model, real_template(name), made)
        if special:
            description = json.loads((made / "tokenizer.json").read_text())
            first = max(t["id"] for t in description["added_tokens"])
            unused = [i for t, i in description["model"]["vocab"].items() if i > first][-len(special) :]
            words = {i: t for t, i in description["model"]["vocab"].items()}
            for token, content in zip(unused, special, strict=True):
                del description["model"]["vocab"][words[token]]
                description["model"]["vocab"][content] = token
                flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
                description["added_tokens"].append({"id": token, "content": content, **flags})
            merged = {words[token] for token in unused}
            merges = description["model"]["merges"]
            description["model"]["merges"] = [m for m in merges if "".join(m.split() if isinstance(m, str) else m) not in merged]
            (made / "tokenizer.json").unlink()
            (made / "tokenizer.json").write_text(json.dumps(description))
    return Tokenizer(made)


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_a_template_shows_how_its_model_writes_calls(model_path: Path, folder: Path, template: str, name: str) -> None:
    tokenizer = tokenizer_of(model_path, template, folder)
    assert tokenizer.dialect is not None and tokenizer.dialect.name == name
    assert tokenizer.offers_tools
    assert "weather" in tokenizer.render(HI, [WEATHER])
    assert tokenizer.parallel_calls == (name != "llama3")


@pytest.mark.parametrize("template", UNKNOWN)
def test_what_is_not_known_is_refused(model_path: Path, folder: Path, template: str) -> None:
    tokenizer = tokenizer_of(model_path, template, folder)
    with pytest.raises(InvalidRequest, match=r"has no tools|not known here") as caught:
        tokenizer.render(HI, [WEATHER])
    assert caught.value.param == "tools"


def test_the_default_model_has_no_tools(model_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no tools"):
        Tokenizer(model_path).render(HI, [WEATHER])


def written(tokenizer: Tokenizer, message: dict[str, Any]) -> str:
    """What the template makes of an answer."""
    before = tokenizer.render(HI)
    result = {"role": "tool", "content": "sunny", "tool_call_id": "callprobe"}
    whole = tokenizer.render([*HI, message, result])
    assert whole.startswith(before)
    answer = whole[len(before) : whole.index("sunny")]
    for end in ("<|im_end|>", "<|eot_id|>", "</s>", "[TOOL_RESULTS]", "<|end_of_text|>", "<|endoftext|>"):
        answer = answer.split(end)[0]
    return answer


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_call_as_the_template_writes_it_is_read_however_it_is_cut(model_path: Path, folder: Path, template: str) -> None:
    tokenizer = tokenizer_of(model_path, template, folder)
    dialect = tokenizer.dialect
    assert dialect is not None
    arguments = {"town": 'K\u00f6ln "am Rhein" </tool_call> [TOOL_CALLS] {', "days": 2}
    if dialect.name == "mistral":
        arguments["town"] = 'K\u00f6ln "am Rhein" {'
    answer = written(tokenizer, calling(arguments))
    content, (call,) = read(dialect, answer)
    assert not content.strip() and call.name == "weather" and json.loads(call.arguments) == arguments
    for size in (1, 2, 3, 7):
        reading = dialect.reading(frozenset({"weather"}))
        parts = [p for at in range(0, len(answer), size) for p in reading.push(answer[at : at + size])] + reading.finish()
        assert [p for p in parts if isinstance(p, Call)] == [call] and not "".join(p for p in parts if isinstance(p, str)).strip()


HAND_WRITTEN: list[tuple[Dialect, str, str, list[tuple[str, Any]]]] = [
    (
        Hermes(),
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>',
        "Let me see.",
        [("weather", {"town": "Rome"})],
    ),
    (
        Hermes(),
        '<tool_call>{"arguments":{},"name":"time"}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"town": "a"}}</tool_call>\n',
        "",
        [("time", {}), ("weather", {"town": "a"})],
    ),
    (Hermes(), '<tool_call>\n{"name": "weather", "arguments": {"town": "a\nb"}}\n</tool_call>', "", [("weather", {"town": "a\nb"})]),
    (
        Hermes(),
        '<tool_call>\n{"name": "time", "arguments": {oops\n</tool_call> x',
        '<tool_call>\n{"name": "time", "arguments": {oops\n</tool_call> x',
        [],
    ),
    (
        Hermes(),
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        [],
    ),
    (Hermes(), "a < b <tool", "a < b <tool", []),
    (Hermes(), "  def f():\n\n\n    return 1  \n", "  def f():\n\n\n    return 1  \n", []),
    (Hermes(), '<tool_call>\n{"name": "time", "argu', '<tool_call>\n{"name": "time", "argu', []),
    (Hermes(), '<tool_call>\n{"name": "time", "arguments": "{}"}\n</tool_call>', "", [("time", {})]),
    (Llama3(), '{"name": "weather", "parameters": {"town": "Rome"}}', "", [("weather", {"town": "Rome"})]),
    (Llama3(), '<|python_tag|>{"type": "function", "name": "time", "parameters": {}}', "", [("time", {})]),
    (
        Llama3(),
        '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"town": "a"}}',
        "",
        [("time", {}), ("weather", {"town": "a"})],
    ),
    (Llama3(), '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    (Llama3(), '{"town": "Rome"}', '{"town": "Rome"}', []),
    (Llama3(), 'The answer is {"name": "time", "parameters": {}}.', 'The answer is {"name": "time", "parameters": {}}.', []),
    (Llama3(), '{"name": "time", "para', '{"name": "time", "para', []),
    (Llama3(), "  \n", "  \n", []),
    (
        Mistral(),
        '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Rome"}}, {"name": "time", "arguments": {}}]',
        "",
        [("weather", {"town": "Rome"}), ("time", {})],
    ),
    (Mistral(), 'Well. [TOOL_CALLS] [{"name": "time", "arguments": {}, "id": "abcdefghi"}]', "Well.", [("time", {})]),
    (Mistral(), '[TOOL_CALLS][{"name": "time"', '[TOOL_CALLS][{"name": "time"', []),
    (Mistral(True), '[TOOL_CALLS]weather[ARGS]{"town": "Rome"}[TOOL_CALLS]time[ARGS]{}', "", [("weather", {"town": "Rome"}), ("time", {})]),
    (Mistral(True), "[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}", "", [("time", {})]),
    (Mistral(True), "a [TOOL", "a [TOOL", []),
]


@pytest.mark.parametrize(("dialect", "answer", "said", "calls"), HAND_WRITTEN)
def test_hand_written_answers(dialect: Dialect, answer: str, said: str, calls: list[tuple[str, Any]]) -> None:
    """What is no call of a tool that was offered is text, every character of it."""
    for size in (1, 3, 1000):
        reading = dialect.reading(frozenset({"weather", "time"}))
        parts = [p for at in range(0, len(answer), size) for p in reading.push(answer[at : at + size])] + reading.finish()
        assert "".join(p for p in parts if isinstance(p, str)) == said
        assert [(p.name, json.loads(p.arguments)) for p in parts if isinstance(p, Call)] == calls


def accepts(form: Form, tokenizer: Tokenizer, text: str, vocab: int = 49152) -> bool:
    """Whether an answer may be this text, and end there."""
    mask = np.zeros(vocab // 32, np.int32)

    def allowed() -> set[int]:
        form.allow(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    for token in tokenizer.encode(text):
        if token not in allowed():
            return False
        form.take(token)
    return bool(allowed() & STOP_IDS)


STOP_IDS = {0, 2}
WEATHER_TOOL = Tool("weather", PARAMETERS, strict=True)
TIME_TOOL = Tool("time", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
SPECIAL = {
    "mistralai-Mistral-Nemo-Instruct-2407": ("[TOOL_CALLS]",),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}


@pytest.mark.parametrize("special", [False, True], ids=["spelt", "special"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_is_held_to_its_calls(model_path: Path, folder: Path, template: str, special: bool) -> None:
    """With the template's marks as special tokens, and as text that others spell, too."""
    marks = SPECIAL.get(template, ("<tool_call>", "</tool_call>") if TEMPLATES[template] == "hermes" else ())
    if special and not marks:
        pytest.skip("these calls have no marks")
    tokenizer = tokenizer_of(model_path, template, folder, marks if special else ())
    grammars = Grammars(tokenizer, 49152, STOP_IDS)

    def form(choice: Choice, *tools: Tool) -> Form:
        grammar = grammars.of_tools(tools or (WEATHER_TOOL, TIME_TOOL), choice, None)
        assert grammar is not None
        return grammars.form(grammar, "tools")

    def call(arguments: dict[str, Any], name: str = "weather") -> str:
        text = written(tokenizer, calling(arguments, name)).strip()
        return text.split(', "id"')[0] + "}]" if ', "id"' in text else text

    rome = call({"town": "Rome", "days": 2})
    required, auto, none = Choice("required"), Choice("auto", parallel=False), Choice("none")
    assert accepts(form(required), tokenizer, rome)
    assert accepts(form(required), tokenizer, call({}, "time"))
    assert accepts(form(auto), tokenizer, rome)
    assert accepts(form(auto), tokenizer, "It is sunny.\n")
    assert accepts(form(none), tokenizer, "It is sunny.\n")
    assert not accepts(form(none), tokenizer, rome)
    assert not accepts(form(required), tokenizer, "It is sunny.")
    for wrong in ({"town": 5}, {}, {"town": "Rome", "more": 1}):
        assert not accepts(form(required), tokenizer, call(wrong))
        assert not accepts(form(auto), tokenizer, call(wrong))
    assert not accepts(form(required, TIME_TOOL), tokenizer, rome)
    if TEMPLATES[template] != "llama3":
        assert accepts(form(auto), tokenizer, f"I shall look.\n{rome}" if "[TOOL" not in rome else f"I shall look.{rome}")
    if TEMPLATES[template] == "hermes":
        assert accepts(form(required), tokenizer, f"{rome}\n{rome}")
        assert not accepts(form(Choice("required", parallel=False)), tokenizer, f"{rome}\n{rome}")


def test_free_answers_have_no_grammar_and_bad_schemas_of_strict_tools_are_refused(model_path: Path, folder: Path) -> None:
    grammars = Grammars(tokenizer_of(model_path, "Qwen-Qwen2.5-7B-Instruct", folder), 49152, STOP_IDS)
    odd = {"type": "object", "not": {"required": ["a"]}}
    assert grammars.of_tools([Tool("f", odd)], Choice(), None) is None
    assert grammars.of_tools([Tool("f", odd)], Choice("required"), None) is not None
    with pytest.raises(InvalidRequest, match="not") as caught:
        grammars.of_tools([Tool("f", odd, strict=True, field="tools.0.function.parameters")], Choice(), None)
    assert caught.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize("template", ["mistralai-Mistral-Nemo-Instruct-2407", "meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen3-0.6B"])
def test_a_call_the_model_wrote_keeps_its_ids(model_path: Path, folder: Path, template: str) -> None:
    """P4: in every dialect, whatever the order of keys the client sends, and though templates add ids to what the model wrote."""
    marks = (*SPECIAL.get(template, ()), "<|eot_id|>", "<|end_header_id|>", "[/INST]", "</s>")
    tokenizer = tokenizer_of(model_path, template, folder, marks)
    hand_written = {
        "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Rome", "days": 2}}]',
        "llama3": '{"name": "weather", "parameters": {"town": "Rome", "days":2}}',
        "hermes": '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome",  "days": 2}}\n</tool_call>',
    }[TEMPLATES[template]]
    transcripts = Transcripts(tokenizer)
    stored = [*transcripts.encode("ns", "a", tokenizer.render(HI)), *tokenizer.encode(hand_written)]
    transcripts.learn("ns", "a", [stored])
    result = {"role": "tool", "content": "sunny", "tool_call_id": "callprobe"}
    text = tokenizer.render([*HI, calling({"days": 2, "town": "Rome"}), result])
    assert tokenizer.decode(stored) not in text, "it is written another way"
    assert transcripts.encode("ns", "a", text)[: len(stored)] == stored


@pytest.mark.parametrize(
    ("vocabulary", "template"), [("qwen2", "Qwen-Qwen2.5-7B-Instruct"), ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct")]
)
def test_real_vocabularies_spell_what_grammars_demand(tmp_path: Path, vocabulary: str, template: str) -> None:
    from transformers import AutoTokenizer

    gguf = real_vocabulary(vocabulary)
    made: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    made.chat_template = real_template(template)
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    vocab = -(-len(made) // 32) * 32
    end = made.eos_token_id
    grammars = Grammars(tokenizer, vocab, [end])
    grammar = grammars.of_tools([WEATHER_TOOL], Choice("required", parallel=False), None)
    assert grammar is not None
    form = grammars.form(grammar, "tools")
    random = np.random.default_rng(0)
    closers = {tokenizer.encode(text)[0] for text in ('"', "}", '"}')}
    mask, tokens = np.zeros(vocab // 32, np.int32), []
    for _ in range(300):
        form.allow(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if end in allowed:
            break
        closing = [token for token in allowed if token in closers] if random.random() < 0.5 else []
        tokens.append(int(random.choice(closing or allowed)))
        form.take(tokens[-1])
    assert tokenizer.dialect is not None
    content, (call,) = read(tokenizer.dialect, tokenizer.decode(tokens), frozenset({"weather"}))
    assert not content and isinstance(json.loads(call.arguments)["town"], str)
