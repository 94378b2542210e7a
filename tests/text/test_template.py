"""Chat templates give the text that transformers gives, on real templates; nothing of transformers is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from rewake.text.template import ChatTemplate
from rewake.text.toolcalls import REFUSALS
from tests.llama_cpp import sources

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string", "description": "Wö?"}}, "required": ["town"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The <weather>.", "parameters": PARAMETERS}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": {"town": "Kyōto"}}}
USER = {"role": "user", "content": "Hi\n"}
THOUGHT = {"role": "assistant", "content": " Hello ", "reasoning_content": "So."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "system": [{"role": "system", "content": "Be <kind>."}, USER, {"role": "assistant", "content": "Hello"}, USER],
    "thoughts": [USER, THOUGHT, USER],
    "calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "Rain", "tool_call_id": "call00000"},
    ],
    "begun": [USER, {"role": "assistant", "content": "Well, \n"}],
}


def outcome(render: Any) -> str | None:
    try:
        return str(render())
    except REFUSALS:
        return None


def test_real_templates_give_what_transformers_gives() -> None:
    compared = refused = 0
    for file in sorted(sources().glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        ours = ChatTemplate(source, TOKENS)
        for name, messages in CHATS.items():
            for tools in (None, [TOOL]):
                go_on = name == "begun"
                said = [{key: value for key, value in m.items() if value is not None} for m in messages]  # as transformers' own callers do
                expected = outcome(
                    lambda: render_jinja_template([said], tools, None, source, False, go_on, not go_on, **TOKENS)[0][0]  # noqa: B023
                )
                found = outcome(lambda: ours.render(messages, tools, answer=not go_on, go_on=go_on))  # noqa: B023
                assert found == expected, (file.name, name, tools)
                compared, refused = compared + 1, refused + (found is None)
    assert compared > 300 and refused < compared / 3


def test_with_tools_the_template_for_tools_is_taken() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([USER], None, answer=True, go_on=False) == "plain"
    assert template.render([USER], [TOOL], answer=True, go_on=False) == "tools"
    with pytest.raises(TemplateError, match="none is the default: rag"):
        ChatTemplate({"rag": "x"}, {})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__ }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(attack: str) -> None:
    """It is refused, or shown nothing."""
    with suppress(TemplateError):
        assert ChatTemplate(attack, {}).render([USER], None, answer=True, go_on=False) == ""


def test_marks_for_training_change_nothing() -> None:
    source = "{% set x = 1 %}{% generation %}{{ messages[0].content }}{% set x = 2 %}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, {}).render([USER], None, answer=True, go_on=False) == "Hi\n1"


def test_a_model_of_the_native_step_is_served_without_transformers_and_torch(model_path: Path, tmp_path: Path) -> None:
    """Its tokenizer has been read before."""
    code = """
import queue
import sys
from dataclasses import replace
from pathlib import Path
from rewake.config import Config
from rewake.request import Done, Request, Sampling
from rewake.service import open_service
service = open_service(replace(Config(), model=sys.argv[1], data=Path(sys.argv[2]), memory=2**28))
print(service.tokenizer.render([{"role": "user", "content": "Hi"}]))
done = queue.SimpleQueue()
service.engine.submit(Request("r", (1, 2, 3), 4, lambda event: done.put(event), Sampling(temperature=0.7, top_p=0.9, logprobs=2)))
while not isinstance(done.get(), Done):
    pass
service.close()
print([name for name in sys.modules if name in ("transformers", "torch")])
"""
    done = subprocess.run([sys.executable, "-c", code, str(model_path), str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n"), json.dumps(done.stdout)
