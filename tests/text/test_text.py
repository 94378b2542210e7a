"""Text to ids and back, on the real tokenizer."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from rewake.models import resolve
from rewake.text.tokenizer import Tokenizer

SAMPLES = [
    "plain text, with 1234 digits and CamelCase",
    "def f(x):\n        return {\n\n\n            'deep': x,   \n        }\n",
    "emoji 👩‍👩‍👧‍👦 and 中文, עברית, é, \U0001f1eb\U0001f1f7",
    "text like <|x|> and <|im| and trailing spaces   ",
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.mark.parametrize("text", SAMPLES)
def test_streamed_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """A1, A3: and no piece holds half a character."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text == tokenizer.decode(tokenizer.encode(text))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    """As SmolLM was trained; transformers' reading of GGUF forgets it."""
    assert len(tokenizer.encode("1234")) == 4


def test_the_chat_template_is_the_models(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_splitting_at_special_tokens_changes_no_ids(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": SAMPLES[0]}, {"role": "assistant", "content": SAMPLES[1]}])
    pieces = tokenizer.split(text)
    assert "".join(pieces) == text and len(pieces) > 6
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_the_tokenizer_is_the_one_that_transformers_would_choose(model_path: Path) -> None:
    """We open tokenizer.json without asking for its model's class; a part of the signature depends on it."""
    from transformers import AutoTokenizer

    for path in (model_path, resolve("gemma3-270m")):
        theirs = AutoTokenizer.from_pretrained(path)
        ours = Tokenizer(path)
        assert ours.digest() == hashlib.sha256(theirs.backend_tokenizer.to_str().encode()).hexdigest()
        assert theirs.eos_token_id in ours.stop_ids(path)


def test_a_tokenizer_is_opened_without_torch_and_models(model_path: Path) -> None:
    opens = "from rewake.text.tokenizer import Tokenizer; Tokenizer(pathlib.Path(sys.argv[1]))"
    code = f"import pathlib, sys; {opens}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(model_path)], check=False).returncode == 0


def test_a_model_is_read_though_nothing_can_be_kept(model_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder is the user's own; the cache is where no folder can be."""
    (tmp_path / "file").touch()
    tokens = Tokenizer(model_path).encode(SAMPLES[1])
    monkeypatch.setenv("REWAKE_MODELS", str(tmp_path / "file" / "models"))
    assert Tokenizer(model_path).encode(SAMPLES[1]) == tokens


@pytest.mark.parametrize("name", ["tokenizer.json", "vocabulary.json"])
def test_a_tokenizer_is_read_again_if_what_was_kept_of_it_is_damaged(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A power cut leaves files empty; every start would have failed from then on."""
    monkeypatch.setenv("REWAKE_MODELS", str(tmp_path))
    wanted = Tokenizer(model_path).digest()
    (kept,) = tmp_path.glob(f"tokenizers/*/{name}")
    kept.write_text("")
    assert Tokenizer(model_path).digest() == wanted and not kept.exists()
    assert Tokenizer(model_path).digest() == wanted and kept.stat().st_size
