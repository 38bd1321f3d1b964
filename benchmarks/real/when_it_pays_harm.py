"""Harm: which of the draft's errors change the target's answer, what tells them apart, can a gate be taught it?

    python benchmarks/real/when_it_pays_harm.py train --labels DIR --prompts FILE --out DIR
    python benchmarks/real/when_it_pays_harm.py check --data DIR [--kept FILE] [--gates harm=DIR]

An error is a place of the target's greedy answer where the draft's first choice is another token. It is put there and
the target goes on: an error is harmless if the answer says the same, or passes the same tests. It re-joins if within
``AHEAD`` tokens the target writes ``SAME`` tokens of its own answer again, near their old place, with the same numbers
on the way: a cheap stand-in. ``train`` teaches a gate that: labels of class "target" at temperature 0 are 1 where the
models agree or the draft's token re-joins. ``check`` counts both on other answers.
"""

from __future__ import annotations

import math
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

import sprinter
from benchmarks.common import cells, grid, option_parser, print_written, save
from benchmarks.real.when_it_pays import PAIRS, PLAIN, asked, graded, record, run
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.quality.checks import final_number
from sprinter.bench.statistics import bootstrap
from sprinter.engine.prompt import encode_prompt
from sprinter.heads.artifact import load_head
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import Head
from sprinter.laws import raw_law
from sprinter.models.choose import make_runner
from sprinter.theory.recording import Recording, first_choices
from sprinter.training.card import save_trained
from sprinter.training.dataset import read_positions
from sprinter.training.examples import Example, read_examples
from sprinter.training.records import read_shards
from sprinter.training.roc import judge
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

NAME = "real/when_it_pays_harm"
AHEAD, SAME, SHIFT = 16, 4, 8
ROWS = sized(16, 4)
ANSWERS, FOLLOWED, SHARE = sized((12, 4, 0.5), (2, 2, 1.0))
"""Answers that are read, those of them of which errors are followed to the end, and the share of these errors."""
SIGNS = re.compile(r"\d+|[-+*/=]")


@dataclass
class Error:
    """A place where the draft's first choice differs.

    Attributes:
        text: number of the answer. place: of its tokens. row: of the recording.
        instead: the draft's token. new: what the target writes after it.
        rejoins, harmless: see above; harmless is None if it was not followed to the end.
    """

    text: int
    place: int
    row: int
    instead: int
    new: list[int] = field(default_factory=list)
    rejoins: bool = False
    harmless: bool | None = None


def rejoins(pair: sprinter.Pair, own: Sequence[int], error: Error) -> bool:
    """Whether the target comes back to its own answer with the same numbers on the way."""
    rest, new = own[error.place :], [error.instead, *error.new[:AHEAD]]
    assert pair.tokenizer is not None
    for j in range(1, len(new) - SAME + 1):
        for s in range(max(1, j - SHIFT), min(len(rest) - SAME, j + SHIFT) + 1):
            if [*new[j : j + SAME]] == [*rest[s : s + SAME]]:
                passed = [SIGNS.findall(str(pair.tokenizer.decode(ids))) for ids in (new[:j], [*rest[:s]])]
                return passed[0] == passed[1]
    return False


def go_on(pair: sprinter.Pair, prompt: Sequence[int], own: Sequence[int], errors: Sequence[Error],
          ends: Sequence[int], room: Sequence[int]) -> None:  # fmt: skip
    """Let the target go on after each error of one answer."""
    over = {*ends, *pair.models.target.eos_ids}
    live = [
        (error, most) for error, most in zip(errors, room, strict=True) if most and error.instead not in over
    ]
    if live:
        how: Any = {"method": "autoregressive", "temperature": 0.0, "rows": ROWS}
        pair.generate_batch([[*prompt, *own]], max_new_tokens=1, **how)  # read once: the others begin like it
        outs = pair.generate_batch(
            [[*prompt, *own[: error.place], error.instead] for error, _ in live],
            max_new_tokens=[most for _, most in live], stop_token_ids=[[*ends]] * len(live), **how,
        )  # fmt: skip
        for (error, _), out in zip(live, outs, strict=True):
            error.new = [token.id for token in out.tokens]
    for error in errors:
        error.rejoins = rejoins(pair, own, error)


# --- a gate -----------------------------------------------------------------------------------------------------------
def taught(options: Any) -> None:
    """Train a gate on "agrees or re-joins", with the ordinary trainer."""
    pair = sprinter.load_pair(**PAIRS[options.pair].options, prefix_cache_bytes=3 << 30)
    settings = TrainSettings(preset="linear", label="overlap", features=options.features, tau=0.5)
    positions = read_positions([options.labels], settings.inputs)
    labels, examples = [], [*read_examples([options.prompts], chat=True)]
    for records in read_shards(options.labels):
        for number in records.prompt.unique_consecutive().tolist():
            one = records.select((records.prompt == number).nonzero()[:, 0])
            own, example = one.token.tolist(), examples[number]
            assert isinstance(example, Example)
            prompt = encode_prompt(example.prompt, pair.models)
            assert len(prompt.ids) == int(one.position[0] - one.step[0]), "these labels are of other prompts"
            firsts = one.top_ids.gather(1, one.top_q.argmax(1, keepdim=True))[:, 0].tolist()
            errors = [Error(number, t, t, x) for t, x in enumerate(firsts) if x != own[t]]
            go_on(pair, prompt.ids, own, errors, prompt.ends, [AHEAD] * len(errors))
            same = torch.ones(len(own))
            same[[error.place for error in errors if not error.rejoins]] = 0.0
            if own[-1] not in pair.models.target.eos_ids:  # cut: what its last tokens lead to is not known
                same[-AHEAD:] = torch.nan
            labels.append(same)
            print(f"\r{len(labels)} texts", end="", file=sys.stderr)
    joined = torch.cat(labels)
    positions.columns["overlap"] = joined[:, None].expand(-1, 3).clone()
    positions = positions.select(~joined.isnan())
    trained = train(positions, settings)
    report = judge(trained.head, positions.select(positions.parts(0) == 2))
    save_trained(trained, report, positions, options.out)
    print_written(NAME, options.out)


# --- what harm is -----------------------------------------------------------------------------------------------------


def known(recording: Recording) -> torch.Tensor:
    """The draft's law, 0 for groups of tokens, ``[N, K]``."""
    ids, raw = recording.outcomes, recording.raw_q
    return raw if ids is None else raw.masked_fill(ids < 0, 0.0)


def drafted(recording: Recording) -> torch.Tensor:
    """The draft's first choice at each position, ``[N]``."""
    first, ids = known(recording).argmax(-1, keepdim=True), recording.outcomes
    return (first if ids is None else ids.gather(1, first))[:, 0]


def errors_of(recording: Recording) -> list[Error]:
    """All errors of the draft along the recorded answers."""
    firsts, differ, found = drafted(recording).tolist(), ~first_choices(recording), []
    for text, (start, length) in enumerate(zip(recording.starts, recording.lengths, strict=True)):
        rows = [row for row in range(start, start + length) if differ[row]]
        found += [Error(text, row - start, row, firsts[row]) for row in rows]
    return found


def followed(pair: sprinter.Pair, asked_of: Sequence[Any], recording: Recording, most: int) -> list[Error]:
    """The errors of a suite, each with what it does."""
    chance, errors = random.Random(0), errors_of(recording)
    assert pair.tokenizer is not None
    texts = recording.ids.split(list(recording.lengths))
    for text, ((sample, prompt, ends), ids) in enumerate(zip(asked_of, texts, strict=False)):
        own, mine = ids.tolist(), [error for error in errors if error.text == text]
        over = {*ends, *pair.models.target.eos_ids}
        whole = [text < FOLLOWED and own[-1] in over and chance.random() < SHARE for _ in mine]
        room = [most - error.place - 1 for error in mine]
        room = [free if full else min(AHEAD, free) for free, full in zip(room, whole, strict=True)]
        go_on(pair, prompt, own, mine, ends, room)
        tried = [
            error
            for error, full in zip(mine, whole, strict=True)
            if full and error.new and error.new[-1] in over
        ]
        whole_texts = [own, *([*own[: error.place], error.instead, *error.new] for error in tried)]
        said = [str(pair.tokenizer.decode(ids, skip_special_tokens=True)) for ids in whole_texts]
        if sample.check is not None and sample.check.kind == "code":
            made = [SimpleNamespace(prompt_ids=prompt, tokens=[], text=one) for one in said]
            right: list[Any] = graded(pair, [sample] * len(made), made)  # type: ignore[arg-type]
        else:
            right = [final_number(one) for one in said]
        for error, one in zip(tried, right[1:], strict=True):
            error.harmless = one == right[0]
        print(f"\r{text + 1} answers", end="", file=sys.stderr)
    return errors


def area(scores: np.ndarray, good: np.ndarray, text: np.ndarray) -> list[float | None]:
    """Chance that a re-joining error scores above another, with an interval by answer."""
    texts = [np.flatnonzero(text == one) for one in np.unique(text)]

    def of(rows: np.ndarray) -> float:
        some = np.concatenate([texts[i] for i in rows])
        over = scores[some][good[some]][:, None] - scores[some][~good[some]]
        return float((over > 0).mean() + (over == 0).mean() / 2) if over.size else math.nan

    return list(bootstrap(lambda rows: np.apply_along_axis(of, -1, rows), len(texts)))


def guarded(pair: sprinter.Pair, recording: Recording) -> dict[str, np.ndarray]:
    """By guard, at which positions no draft token would be trusted: all see the prefix and the draft's first choice."""
    assert pair.tokenizer is not None
    said = [str(pair.tokenizer.decode([id])) for id in drafted(recording).tolist()]
    before = ["", *(str(pair.tokenizer.decode([id])) for id in recording.ids[:-1].tolist())]
    place = np.concatenate([np.arange(length) for length in recording.lengths])
    return {
        "everywhere": np.ones(len(said), dtype=bool),
        "first token": place < 1,
        "first 4 tokens": place < 4,
        "first 16 tokens": place < 16,
        "first token of a line": np.array(["\n" in one for one in before]),
        "a number or sign is drafted": np.array([bool(SIGNS.search(one)) for one in said]),
        "after a number or sign": np.array([bool(SIGNS.search(one)) for one in before]),
    }


@torch.inference_mode()
def scored(
    pair: sprinter.Pair, heads: Mapping[str, Head], prompts: Sequence[Sequence[int]], recording: Recording
) -> dict[str, torch.Tensor]:
    """Scores of gates along a recording, by name, ``[N]`` each: the draft reads it once more."""
    assert pair.models.draft is not None
    longest = max(map(len, prompts)) + max(recording.lengths)
    runner = make_runner(pair.models.draft.model, batch=1, max_len=longest)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in heads}
    texts = recording.ids.split(list(recording.lengths))  # type: ignore[no-untyped-call]
    for prompt, ids in zip(prompts, texts, strict=True):
        runner.rewind([0])
        read = runner.extend(torch.tensor([[*prompt, *ids.tolist()[:-1]]]))
        assert read.logits is not None
        law = raw_law(read.logits[0, len(prompt) - 1 :, : pair.models.vocab_size].float())
        step = DraftStep(read.hidden[0, len(prompt) - 1 :], law=law, temperature=torch.zeros(len(ids)))
        for name, head in heads.items():
            parts[name].append(head(read_features(head.features, step)))
    return {name: torch.cat(each) for name, each in parts.items()}


def facts_of(
    pair: sprinter.Pair, gates: Mapping[str, torch.Tensor], recording: Recording, errors: Sequence[Error]
) -> dict[str, Any]:
    """Counts of one suite."""
    rejoin, text, rows = (
        np.array([getattr(one, name) for one in errors]) for name in ("rejoins", "text", "row")
    )
    raw, tables = recording.raw_p, {}
    scores = {
        "draft: entropy": -recording.signals["entropy"], "draft: max q": recording.signals["max_prob"],
        **{f"{name} gate": scores for name, scores in gates.items()},
        "target: p of the draft's token / max p":
            raw.gather(1, known(recording).argmax(-1, keepdim=True))[:, 0] / raw.amax(-1),
    }  # fmt: skip
    for name, inside in guarded(pair, recording).items():
        here = inside[rows]
        tables[name] = [int(inside.sum()), int(here.sum()), int((here & ~rejoin).sum())]
        if name != "everywhere":
            kept = scores["draft: max q"].masked_fill(torch.from_numpy(inside), -1.0)
            scores[f"draft: max q, none trusted: {name}"] = kept
    told = {name: one.double().numpy()[rows] for name, one in scores.items()}
    half = len(errors) // 2
    sure = [error for error in errors if error.harmless is not None]
    return {
        "errors": len(errors), "rejoin": int(rejoin.sum()),
        "followed": [[error.rejoins, error.harmless] for error in sure],
        "areas": {name: area(one, rejoin, text) for name, one in told.items()},
        "kept": {name: int((~rejoin)[np.argsort(-one, kind="stable")[:half]].sum()) for name, one in told.items()},
        "guards": tables,
    }  # fmt: skip


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """What was counted: errors, what tells them apart, where they are."""
    first, second, third = [], [], []
    for one in entries:
        suite, errors, share = one["suite"], one["errors"], one["rejoin"] / max(1, one["errors"])
        kinds = [[fine for rejoins, fine in one["followed"] if rejoins is kind] for kind in (True, False)]
        of_kinds = " | ".join(f"{sum(each)}/{len(each)}" for each in kinds)
        first.append(f"{suite} | {one['positions']} | {errors} | {share:.2f} | {of_kinds}")
        for name, found in one["areas"].items():
            told = "–" if math.isnan(found[0]) else cells(tuple(found))
            second.append(f"{suite} | {name} | {told} | {one['kept'][name]}/{errors // 2}")
        for name, (inside, here, bad) in one["guards"].items():
            third.append(
                f"{suite} | {name} | {inside / one['positions']:.3f} | {here / max(1, errors):.3f} | {bad}/{here}"
            )
    return "\n\n".join([
        "\n".join(grid("text | positions | errors | that re-join | harmless of those | of the others", first)),
        "\n".join(grid("text | signal | AU-ROC for re-joining | that do not, in the upper half", second)),
        "\n".join(grid("text | where none is trusted | share of positions | of errors | that do not re-join", third)),
    ])  # fmt: skip


def check(options: Any) -> None:
    """Count harm, and judge what tells it."""
    began, setting = time.time(), PAIRS[options.pair]
    entries: list[dict[str, Any]] = []
    pair = sprinter.load_pair(**setting.options, prefix_cache_bytes=3 << 30)
    heads = {"shipped": pair.heads["gate"], **{name: load_head(folder) for name, folder in options.gates}}
    prompts, before = (
        asked(pair, setting, options.data),
        options.errors is not None and options.errors.is_file(),
    )
    done = torch.load(options.errors, weights_only=False) if before else {}
    if options.kept is None:
        _, outs = run(pair, PLAIN, prompts, setting)
        recordings = record({"": pair}, outs, [suite for suite, each in prompts.items() for _ in each])
    else:
        recordings = torch.load(options.kept, weights_only=False)
    for suite, (_, most, _) in setting.suites.items():
        recording = recordings[suite].first_texts(ANSWERS)
        gates = scored(pair, heads, [ids for _, ids, _ in prompts[suite]][:ANSWERS], recording)
        if suite not in done:
            done[suite] = followed(pair, prompts[suite], recording, most)
            if options.errors is not None:
                torch.save(done, options.errors)
        found = facts_of(pair, gates, recording, done[suite])
        entries.append({"suite": suite, "positions": len(recording.ids), **found})
        save(f"{NAME}_{options.pair}", table(entries), began, len(recording.lengths), suites=entries)


def main() -> None:
    """Do one part."""
    parser = option_parser(__doc__)
    parser.add_argument("part", choices=("train", "check"), nargs=None if not SMOKE else "?", default="check")
    parser.add_argument("--pair", choices=PAIRS, default=sized("whole", "builtin"))
    parser.add_argument(
        "--kept", type=Path, help="laws of 'when_it_pays.py counts --keep'; else it records them"
    )
    parser.add_argument(
        "--gates", nargs="+", type=lambda one: one.partition("=")[::2], default=[], metavar="NAME=DIR"
    )
    parser.add_argument(
        "--errors", type=Path, help="file of the followed errors, to judge further gates by them"
    )
    parser.add_argument("--labels", help="folder of 'sprinter gate label --classes target --temperature 0'")
    parser.add_argument("--prompts", help="the prompts of these labels")
    parser.add_argument("--features", default="hidden,entropy,max_q,top_q(k=10)", help="that the gate reads")
    parser.add_argument("--out", type=Path, help="folder of the gate")
    options = parser.parse_args()
    {"train": taught, "check": check}[options.part](options)


if __name__ == "__main__":
    main()
