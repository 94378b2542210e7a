"""What the KV codec costs in quality: perplexity, agreement and recall beside plain bfloat16 K and V.

Text: WikiText-2's test set, cut into windows of 512, 2,048 and 8,192 tokens; 32k tokens are scored at each size. A window
begins with what the model's texts begin with, if anything: Gemma without <bos> is another model (perplexity 105 instead of
32). Every codec reads the same windows through the pages that serving uses, in chunks of 512 tokens: K and V are coded when they
are appended, and attention only ever sees coded values, the current chunk's too. So what is measured is the product's own
arithmetic, and nothing else differs: model, weights, tokens and chunks are the same.
  ppl      perplexity relative to bf16 K and V; 95 % interval from a paired bootstrap over runs of 64 tokens
  top-1    how often the best next token is the same; bf16 against f32 weights alone agree on 97.7 %: that is the noise floor
  KL       mean divergence of the next token's distribution from bf16's
Recall: many facts in one context, each asked for by itself behind it (the context's pages are computed once). A question
counts if greedy decoding gives the whole answer.
  passkey  one five-digit key each of some people, in 700 tokens of WikiText prose, at all depths
  pairs    24 words with a number each, some 220 tokens
4.5 bits a value leave K a step of a fifteenth of its range in each group of 64 values: rotation spreads a few large
channels over all, and centring takes away what they have in common, so that the range shrinks and the step with it.
Time goes into prefill: 2 x 135M FLOPs for each of 32k tokens x 3 sizes x codecs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, finish, flags, table
from rewake.backends.base import Batch
from rewake.backends.torch.calibrate import cut
from rewake.backends.torch.loader import LoadedModel, load_model
from rewake.backends.torch.measure import Scores, arena_bytes, compare, prompt_row
from rewake.backends.torch.model import TorchBackend
from rewake.calibration import choose, find
from rewake.config import Config
from rewake.models import DEFAULT_MODEL, resolve
from rewake.quant import CODINGS, PAGE_TOKENS
from rewake.text.tokenizer import Tokenizer

WINDOWS = (512, 2048, 8192)
SCORED = 32_768
QUICK_SCORED = 4096
RUN = 64  # tokens that are drawn together in the bootstrap: neighbours' errors are not independent
DRAWS = 2000
DATA = Path(__file__).parents[2] / "shared" / "data"
PLAIN = " rotated"  # behind a codec's name: not centred
LIMITS = {  # at 2,048: perplexity, top-1
    DEFAULT_MODEL: {"q4": (0.04, 0.89), "q4+": (0.008, 0.96), "k8v4": (0.01, 0.94)},
    "gemma3-270m": {"q4": (0.08, 0.84), "q4+": (0.018, 0.945)},
}
NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene Jacob Laura Martin Nadia Oscar Paula Robert".split()
WORDS = (
    "river stone cloud lamp paper engine garden window violin harbour copper meadow signal bottle candle desert feather hammer island "
    "jacket kettle ladder mirror needle orange pepper rocket silver tunnel velvet winter yellow anchor basket carpet dragon eagle forest"
).split()


@dataclass(frozen=True)
class Question:
    """Asked behind a context: token ids, the last `answer` of which are to be produced."""

    tokens: list[int]
    answer: int


def backends_for(loaded: LoadedModel, codings: Sequence[str], tokens: int) -> dict[str, TorchBackend]:
    """One backend for each coding, with an arena of `tokens`; bf16 first, as the reference."""
    calibration = find(loaded.fingerprint)
    if calibration is None:
        print("not calibrated: K is rotated only (`rewake calibrate`)", file=sys.stderr)
    made = {}
    for name in dict.fromkeys(("bf16", *codings)):
        codec, group = CODINGS[name.removesuffix(PLAIN)]
        mean = None if calibration is None or name.endswith(PLAIN) else calibration.k_mean
        pages = -(-tokens // PAGE_TOKENS) + 1
        made[name] = TorchBackend(loaded, codec.name, arena_bytes(loaded.spec, codec, group, pages), group, mean)
    return made


def perplexity(backends: Mapping[str, TorchBackend], begin: list[int], ids: Sequence[int], window: int, scored: int) -> dict[str, Scores]:
    """Scores of the first `scored` tokens of `ids`, in windows behind `begin`; without it they overlap by the token a window ends with."""
    parts: dict[str, list[Scores]] = {name: [] for name in backends}
    whole = -(-scored // window) * window
    for number, tokens in enumerate(cut(ids[: whole + 1], window, begin), 1):
        for name, part in compare(backends, tokens).items():
            parts[name].append(part)
        print(f"window {window}: {number * window} of {scored} tokens", file=sys.stderr)
    return {name: Scores.join(part) for name, part in parts.items()}


def interval(scores: Scores, reference: Scores) -> tuple[float, float]:
    """Paired bootstrap, 95 %, of the relative perplexity: runs of tokens are drawn, each with both models' likelihoods."""
    differences = scores.nll - reference.nll
    runs = np.array([part.mean() for part in np.array_split(differences, max(len(differences) // RUN, 1))])
    drawn = np.random.default_rng(0).choice(runs, (DRAWS, len(runs))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return exp(low) - 1, exp(high) - 1


def rows_of(window: int, scores: Mapping[str, Scores]) -> Iterator[dict[str, Any]]:
    reference = scores["bf16"]
    for name, mine in scores.items():
        low, high = interval(mine, reference)
        yield {
            "window": window,
            "codec": name,
            "tokens": len(mine.nll),
            "perplexity": mine.perplexity,
            "ppl %": 100 * mine.loss(reference),
            "from": 100 * low,
            "to": 100 * high,
            "KL": float(mine.kl.mean()),
            "top-1 %": 100 * float(mine.agree.mean()),
        }


def passkeys(tokenizer: Tokenizer, prose: Sequence[int], seed: int, length: int = 700) -> tuple[list[int], list[Question]]:
    """WikiText prose with a sentence for each of four people in it."""
    rng = random.Random(f"passkey/{seed}")
    people = rng.sample(NAMES, 4)
    keys = {person: f"{rng.randrange(10**5):05d}" for person in people}
    start = rng.randrange(len(prose) - length)
    pieces = [prose[start + i * length // 5 : start + (i + 1) * length // 5] for i in range(5)]
    context = tokenizer.encode(tokenizer.raw("Remember the pass keys in this text.\n"))
    for piece, person in zip(pieces, [*people, ""], strict=True):
        context += list(piece)
        if person:
            context += tokenizer.encode(f"\nThe pass key of {person} is {keys[person]}. Remember it: {keys[person]}.\n")
    return context, [question(tokenizer, f"\nThe pass key of {person} is", f" {keys[person]}") for person in people]


def pairs(tokenizer: Tokenizer, seed: int, num: int = 24, asked: int = 8) -> tuple[list[int], list[Question]]:
    """Lines of `word: number`, and the same line begun again."""
    rng = random.Random(f"pairs/{seed}")
    words = rng.sample(WORDS, num)
    values = {word: f"{rng.randrange(10**4):04d}" for word in words}
    lines = "".join(f"{word}: {values[word]}\n" for word in words)
    context = tokenizer.encode(tokenizer.raw(lines + "\nThe same, in another order:\n"))
    return context, [question(tokenizer, f"{word}:", f" {values[word]}") for word in rng.sample(words, asked)]


def question(tokenizer: Tokenizer, asked: str, answer: str) -> Question:
    tokens = tokenizer.encode(asked + answer)
    return Question(tokens, len(tokens) - len(tokenizer.encode(asked)))


def recall(backend: TorchBackend, context: Sequence[int], questions: Sequence[Question]) -> list[bool]:
    """Whether each answer comes out greedily. Every question's rows overwrite those of the one before: the context stays."""
    for start in range(0, len(context), 512):
        backend.forward(Batch((prompt_row(backend, context[start : start + 512], start),)))
    found = []
    for asked in questions:
        best = backend.score(Batch((prompt_row(backend, asked.tokens, len(context)),))).argmax(-1).tolist()
        found.append(best[-asked.answer - 1 : -1] == asked.tokens[-asked.answer :])
    return found


def recall_rows(backends: Mapping[str, TorchBackend], tokenizer: Tokenizer, prose: Sequence[int], contexts: int) -> list[dict[str, Any]]:
    rows = []
    for name, backend in backends.items():
        found: dict[str, list[bool]] = {"passkey": [], "pairs": []}
        for seed in range(contexts):
            found["passkey"] += recall(backend, *passkeys(tokenizer, prose, seed))
            found["pairs"] += recall(backend, *pairs(tokenizer, seed))
        print(f"recall: {name}", file=sys.stderr)
        both = found["passkey"] + found["pairs"]
        rows.append(
            {"codec": name, "questions": len(both), **{k: float(np.mean(v)) for k, v in found.items()}, "recall": float(np.mean(both))}
        )
    return rows


def bars(model: str, rows: Sequence[Mapping[str, Any]], recalled: Sequence[Mapping[str, Any]], chosen: str) -> list[Bar]:
    at = {row["codec"]: row for row in rows if row["window"] == 2048}
    limits = {name: limit for name, limit in LIMITS.get(model, {}).items() if name in at}
    made = [Bar("quality", f"{name} at 2048: perplexity", at[name]["ppl %"] / 100, most, most=True) for name, (most, _) in limits.items()]
    made += [Bar("quality", f"{name} at 2048: top-1", at[name]["top-1 %"] / 100, least) for name, (_, least) in limits.items()]
    recall_of = {row["codec"]: row for row in recalled}
    if chosen in recall_of:
        made.append(Bar("recall", "bf16", recall_of["bf16"]["recall"], 0.5))
        made.append(Bar("recall", f"{chosen} beside bf16", recall_of[chosen]["recall"] - recall_of["bf16"]["recall"], -0.02))
    return made


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="directory with wikitext2-test.txt (%(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, file or name (%(default)s)")
    parser.add_argument(
        "--kv", nargs="+", default=["q4", "q4" + PLAIN, "q4:32", "q4+", "k8v4", "q8"], help="codecs; ' rotated' behind one: not centred"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=None, help="tokens (512 2048 8192)")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    windows = args.windows or ((2048,) if args.quick else WINDOWS)
    scored, contexts = (QUICK_SCORED, 9) if args.quick else (SCORED, 24)
    codings = ["q4", "q4+", "k8v4"] if args.quick and args.kv == parser.get_default("kv") else args.kv
    path = resolve(args.model)
    loaded, tokenizer = load_model(path, args.threads), Tokenizer(path)
    begin, ids = (
        tokenizer.encode(tokenizer.raw("")),
        tokenizer.encode((args.data / "wikitext2-test.txt").read_text(encoding="utf-8")[: 8 * SCORED]),
    )
    backends = backends_for(loaded, codings, max(*windows, 2048))
    rows = [row for window in windows for row in rows_of(window, perplexity(backends, begin, ids, window, scored))]
    calibration = find(loaded.fingerprint)
    chosen = choose(calibration.losses, Config.kv_loss)[0] if calibration else codings[0]
    recalled = recall_rows({name: b for name, b in backends.items() if name in ("bf16", chosen, "q4")}, tokenizer, ids, contexts)
    table(rows)
    print()
    table(recalled)
    return finish("quality", [*rows, *recalled], bars(args.model, rows, recalled, chosen), args)


if __name__ == "__main__":
    raise SystemExit(main())
