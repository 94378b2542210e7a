"""What a model's folder says of its tokens and its chats: read by transformers once, and by ourselves from then on.

Folders say it in many ways, of some of which later versions of transformers know that they are wrong. Its reading is kept,
under the digest of all files it may depend on and its version:
    tokenizers/KEY/tokenizer.json    as the tokenizers library writes it
    tokenizers/KEY/vocabulary.json   the rest: chat template and special tokens
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from rewake.cache import file_digest, made_once
from rewake.errors import ModelError

__all__ = ["Vocabulary", "open_vocabulary"]

READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")
log = logging.getLogger(__name__)

TOKENS, REST = "tokenizer.json", "vocabulary.json"


@dataclass(frozen=True)
class Vocabulary:
    """`template` is a chat template, several by name, or None. `named` are special tokens by name; `begins` is what texts begin with."""

    template: str | Mapping[str, str] | None
    named: Mapping[str, str]
    begins: str
    end_id: int | None


def open_vocabulary(path: Path) -> tuple[Tokenizer, Vocabulary]:
    """Of the model in the folder `path`. Raises ModelError if its tokenizer cannot be read, or not into a fast one."""
    try:
        kept = made_once(f"tokenizers/{key_of(path)}", lambda folder: keep(path, folder))
    except OSError:  # a cache that cannot be written is none
        return opened(*found_in(path))
    try:
        return opened(*((kept / name).read_text(encoding="utf-8") for name in (TOKENS, REST)))
    except Exception:  # noqa: BLE001 (tokenizers has no error of its own)
        log.warning("%s is damaged, perhaps by a power cut: removed", kept)
        shutil.rmtree(kept, ignore_errors=True)
        return opened(*found_in(path))


def opened(tokens: str, rest: str) -> tuple[Tokenizer, Vocabulary]:
    return Tokenizer.from_str(tokens), Vocabulary(**json.loads(rest))


def key_of(path: Path) -> str:
    """Names what transformers would read."""
    files = sorted({file for pattern in READ for file in path.glob(pattern) if file.is_file()})
    known = [(file.relative_to(path).as_posix(), file_digest(file)) for file in files]
    versions = [version("transformers"), version("tokenizers")]
    return hashlib.sha256(json.dumps([known, versions]).encode()).hexdigest()[:32]


def keep(path: Path, folder: Path) -> None:
    for name, content in zip((TOKENS, REST), found_in(path), strict=True):  # tokenizers' own `save` tells a full disk as any error
        (folder / name).write_text(content, encoding="utf-8")


def found_in(path: Path) -> tuple[str, str]:
    """Have transformers read the tokenizer in `path`; what is kept of that."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # what tokenizer.json says holds whatever class its model has; looking for that one imports models
    reader = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    try:
        found = reader.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path} has no tokenizer that can be read: {error}") from error
    if not found.is_fast:
        raise ModelError("the model's tokenizer has no fast version: its text cannot be streamed exactly")
    backend = found.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    plain, begun = (found.encode("a", add_special_tokens=special) for special in (False, True))
    begins = found.bos_token if begun != plain and begun[0] == found.bos_token_id else ""
    rest = Vocabulary(found.chat_template, found.special_tokens_map, begins, found.eos_token_id)
    return backend.to_str(), json.dumps(asdict(rest))
