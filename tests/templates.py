"""Chat templates that the default model does not have, on the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["HERMES", "TEMPLATES", "THINKING", "with_marks", "with_template"]

# Tools and their calls as Hermes and Qwen have them.
HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


# Opens the model's thoughts, as templates of models that always think do.
THINKING = (
    HERMES.replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
    + "{#- what was thought, up to </think>, is not kept #}"
)


def with_template(model: Path, template: str, folder: Path) -> Path:
    """A folder that is `model` but for its chat template."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return folder


# Written after what the families' own templates do: who may speak when, what is trimmed, where a system message goes.
CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA_3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}"""
MISTRAL_LATER = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set talk = messages[1:] %}
{%- else %}{% set talk = messages %}{% endif %}
{{- '<s>' }}
{%- for m in talk %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' and loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{% set head = messages[0].content + '\\n\\n' %}{% set talk = messages[1:] %}
{%- else %}{% set head = '' %}{% set talk = messages %}{% endif %}
{%- for m in talk %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (head if loop.first else '') + m.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA_2 = GEMMA.replace("{% set head = messages[0].content + '\\n\\n' %}", "{{ raise_exception('System role not supported') }}")
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "hermes": (HERMES, "<|im_end|>"),
    "llama-3": (LLAMA_3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "mistral-later": (MISTRAL_LATER, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "gemma-2": (GEMMA_2, "<end_of_turn>"),
}  # and the token that ends an answer
MARKS = """<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <s> </s> [INST] [/INST] <bos> <start_of_turn>
<end_of_turn>""".split()


def with_marks(folder: Path) -> Path:
    """`folder`, a copy of the default model's tokenizer among others, whose tokenizer has the special tokens of all templates above."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    tokenizer.save_pretrained(folder)
    return folder
