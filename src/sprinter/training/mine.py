"""Mine harmless tokens: which of the draft's first choices can replace the target's without changing the answer?

AutoJudge (arXiv 2504.20039), Algorithm 1: where the draft's first choice differs from the target's greedy answer, put
it there, let the target continue greedily, and compare the final answers. If they are the same, the token is harmless
and stays in the text; else the text goes on as it was. The target's states before and after each such token are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sprinter.decode.checks import at_least, between
from sprinter.engine.pair import Pair
from sprinter.engine.scoring import score_texts
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.training.examples import Example, ExampleEncoder

__all__ = ["MineSettings", "Mined", "mine", "read_mined"]

_INFO, _PART = "mined.json", "part-{:05}.safetensors"
_PREFILL = 512  # tokens of a text that a forward pass reads


@dataclass(frozen=True, slots=True)
class MineSettings:
    """Settings of mining.

    Attributes:
        compare: what of two texts must agree, a name for the card.
        new_tokens: maximum length of an answer; longer ones are left out.
        method: lossless method that writes the greedy texts.
        rows: prompts at a time; each such group is a file.
        share: share of the differing tokens that is tried, drawn by seed, prompt and position.
        seed: of this draw.
        limit: maximum number of prompts; None: all.
    """

    compare: str = "number"
    new_tokens: int = 256
    method: str = "autoregressive"
    rows: int = 16
    share: float = 1.0
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("new_tokens", "rows"):
            at_least(name, getattr(self, name), 1)
        between("share", self.share, 0.001, 1.0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)


@dataclass(frozen=True, slots=True)
class Mined:
    """n tokens that were tried.

    Attributes:
        prompt, position: ``[n]`` int64, the token's prompt and place in the answer, from 0.
        token, instead: ``[n]`` int64, the target's own token and the draft's.
        same: ``[n]`` bool, whether the answer stayed the same.
        log_p: ``[n]`` float32, ln p of the draft's token, p at temperature 1.
        before, after: ``[n, d]`` float16, the target's state that gives p, and after the draft's token.
        info: models, settings and counts.
    """

    prompt: Tensor
    position: Tensor
    token: Tensor
    instead: Tensor
    same: Tensor
    log_p: Tensor
    before: Tensor
    after: Tensor
    info: dict[str, Any]


@dataclass(slots=True)
class _Attempted:
    """A prompt with its answer as it stands, and what was tried in it."""

    prompt: int
    start: int
    ids: list[int]
    answer: Hashable
    firsts: list[int] = field(default_factory=list)  # the draft's first choice at each place of the answer
    at: int = 0  # places before it are settled
    tried: list[tuple[int, int, int, bool]] = field(default_factory=list)


def mine(
    pair: Pair,
    examples: Sequence[Example],
    answer: Callable[[str], Hashable | None],
    directory: Path,
    settings: MineSettings,
    progress: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """Mine all examples, group by group; the same call continues an interrupted one.

    Args:
        examples: prompts; answers that they hold are not used.
        answer: the answer that a text gives, None if it gives none (the prompt is left out).
        progress: called with (prompts done, prompts in all, tokens tried).

    Returns:
        Description of the data, as in ``Mined.info``.

    Raises:
        UserError: a pair without a draft, a lossy method, other settings or models than those in the directory.
    """
    models = pair.models
    if models.draft is None:
        raise UserError("mining tries the tokens of a draft, and this pair has none: give draft=...")
    if models.tokenizer is None:
        raise UserError("mining compares texts, and this pair has no tokenizer: give tokenizer=...")
    encoder = ExampleEncoder(models, settings.new_tokens)
    prompts = [(i, ids) for i, one in enumerate(examples) for why, ids, _ in [encoder(one)] if not why]
    prompts = prompts[: settings.limit]
    if not prompts:
        raise UserError(f"none of {len(examples)} prompts fits: give shorter prompts or fewer new tokens")
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    info = {
        **{
            f"{which}_{key}": value
            for which, model in (("target", models.target), ("draft", models.draft))
            for key, value in (
                ("id", model.id),
                ("revision", model.revision),
                ("fingerprint", weights_fingerprint(model.model)),
            )
        },
        "hidden_size": models.target.hidden_size,
        "prompts": len(prompts),
        "prompts_sha256": digest,
        "settings": asdict(settings),
    }
    _begin(directory, info)
    longest = max(len(ids) for _, ids in prompts) + settings.new_tokens
    miner = _Miner(pair, answer, settings, longest)
    tried = 0
    for number, at in enumerate(range(0, len(prompts), settings.rows)):
        part = directory / _PART.format(number)
        if not part.is_file():
            found, counts = miner.group(prompts[at : at + settings.rows])
            write_atomic(part, save(found, {key: str(value) for key, value in counts.items()}))
        tried += len(load_file(part)["prompt"])
        if progress is not None:
            progress(min(at + settings.rows, len(prompts)), len(prompts), tried)
    return info


def read_mined(directory: str | Path) -> Mined:
    """Read what ``mine`` wrote.

    Raises:
        UserError: nothing was mined there, mining is not finished, a file is damaged.
    """
    folder = Path(directory).expanduser()
    info = _read_info(folder)
    if info is None:
        raise UserError(f"'{directory}' holds no mined tokens: make some with 'sprinter gate mine'")
    groups = -(-info["prompts"] // info["settings"]["rows"])
    parts = [folder / _PART.format(number) for number in range(groups)]
    if missing := [part for part in parts if not part.is_file()]:
        raise UserError(
            f"mining into '{directory}' was interrupted ({len(missing)} of {groups} parts are missing): "
            "give the same 'sprinter gate mine' again to continue"
        )
    try:
        columns = [load_file(part) for part in parts]
        return Mined(**{name: torch.cat([one[name] for one in columns]) for name in columns[0]}, info=info)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"cannot read mined tokens from '{directory}' ({error}): mine again") from None


def _read_info(directory: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((directory / _INFO).read_text())
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read '{directory / _INFO}' ({error}): mine into another directory") from None


def _begin(directory: Path, info: dict[str, Any]) -> None:
    known = _read_info(directory)
    if known is not None:
        for key, value in info.items():
            if known.get(key) != value:
                raise UserError(
                    f"'{directory}' holds tokens that were mined with another {key.replace('_', ' ')}: "
                    "give another --out, or remove it"
                )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / _INFO, json.dumps(info, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write into '{directory}' ({error.strerror}): give another --out") from error


class _Miner:
    """Mines groups of prompts."""

    def __init__(
        self, pair: Pair, answer: Callable[[str], Hashable | None], settings: MineSettings, longest: int
    ) -> None:
        assert pair.models.draft is not None
        self._pair, self._answer, self._settings = pair, answer, settings
        self._ends = frozenset(pair.models.target.eos_ids)
        self._draft = make_runner(pair.models.draft.model, max_len=longest + 1)
        self._target = make_runner(pair.models.target.model, max_len=longest + 1)

    def group(self, prompts: Sequence[tuple[int, list[int]]]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The columns of a group, and how many of its prompts have an answer."""
        settings = self._settings
        answers = self._continue([ids for _, ids in prompts], [settings.new_tokens] * len(prompts))
        texts = []
        for (number, ids), new in zip(prompts, answers, strict=True):
            said = self._said(new)
            if new and new[-1] in self._ends and said is not None:
                text = _Attempted(number, len(ids), [*ids, *new], said)
                text.firsts = self._firsts(text)
                texts.append(text)
        live = list(texts)
        while live := [text for text in live if self._next(text)]:
            swapped = [[*text.ids[: text.start + text.at], text.firsts[text.at]] for text in live]
            room = [
                settings.new_tokens - (len(ids) - text.start) for ids, text in zip(swapped, live, strict=True)
            ]
            after = self._continue(swapped, room)
            for text, ids, new in zip(live, swapped, after, strict=True):
                whole = [*ids, *new]
                own, instead = text.ids[text.start + text.at], ids[-1]
                same = whole[-1] in self._ends and self._said(whole[text.start :]) == text.answer
                text.tried.append((text.at, own, instead, same))
                text.at += 1
                if same:
                    text.ids = whole
                    text.firsts = self._firsts(text)
        return self._columns(texts), {"prompts": len(prompts), "answered": len(texts)}

    def _continue(self, prompts: list[list[int]], room: list[int]) -> list[list[int]]:
        """The target's greedy continuations; none where the text has ended or has no room."""
        open_ = [i for i, ids in enumerate(prompts) if room[i] > 0 and ids[-1] not in self._ends]
        found: list[list[int]] = [[] for _ in prompts]
        if open_:
            made = self._pair.generate_batch(
                [prompts[i] for i in open_], method=self._settings.method, temperature=0.0,
                max_new_tokens=[room[i] for i in open_], rows=min(len(open_), self._settings.rows),
                require_lossless=True,
            )  # fmt: skip
            for i, one in zip(open_, made, strict=True):
                found[i] = [token.id for token in one.tokens]
        return found

    def _said(self, new: list[int]) -> Hashable | None:
        tokenizer = self._pair.tokenizer
        assert tokenizer is not None
        return self._answer(str(tokenizer.decode(new, skip_special_tokens=True)))

    def _firsts(self, text: _Attempted) -> list[int]:
        """The draft's first choice at each place of the answer; those before ``at`` are kept."""
        start = text.start + text.at
        if start >= len(text.ids):
            return text.firsts
        self._draft.rewind([0])
        given = (text.ids[:start], text.ids[start:])
        (scored,) = _finished(score_texts(self._draft, [given], self._pair.models.vocab_size, top=1))
        return [*text.firsts[: text.at], *scored.top_ids[:, 0].tolist()]

    def _next(self, text: _Attempted) -> bool:
        """Go to the next place where the draft differs, by the settings' share; False if there is none."""
        answer = text.ids[text.start :]
        while text.at < len(answer):
            if text.firsts[text.at] != answer[text.at] and self._tries(text.prompt, text.at):
                return True
            text.at += 1
        return False

    def _tries(self, prompt: int, place: int) -> bool:
        settings = self._settings
        digest = hashlib.sha256(f"{settings.seed}:{prompt}:{place}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < settings.share

    def _columns(self, texts: Sequence[_Attempted]) -> dict[str, Tensor]:
        size = self._pair.models.target.hidden_size
        rows = [(text.prompt, *one) for text in texts for one in text.tried]
        numbers = torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)
        states = [one for text in texts for one in self._states(text)]
        joined = [torch.stack(column) for column in zip(*states, strict=True)] if states else []
        before, after, log_p = joined or [torch.zeros(0, size), torch.zeros(0, size), torch.zeros(0)]
        return {
            "prompt": numbers[:, 0].clone(), "position": numbers[:, 1].clone(), "token": numbers[:, 2].clone(),
            "instead": numbers[:, 3].clone(), "same": numbers[:, 4].bool(), "log_p": log_p.float(),
            "before": before.half(), "after": after.half(),
        }  # fmt: skip

    @torch.inference_mode()
    def _states(self, text: _Attempted) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The target's states before and after each tried token ``[d]``, and the token's log-probability ``[]``."""
        runner, read = self._target, 0
        runner.rewind([0])
        latest: tuple[Tensor, Tensor] | None = None
        for place, _, instead, same in text.tried:
            end = text.start + place
            if read < end:
                _read(runner, text.ids[read : end - 1])
                latest = _last(runner, text.ids[end - 1])
            assert latest is not None, "a prompt has a token"
            logits, before = latest
            following = _last(runner, instead)
            yield before.cpu(), following[1].cpu(), torch.log_softmax(logits.float(), -1)[instead].cpu()
            if same:
                read, latest = end + 1, following
            else:
                runner.rewind([end])
                read = end


def _read(runner: Runner, ids: Sequence[int]) -> None:
    for at in range(0, len(ids), _PREFILL):
        runner.extend(torch.tensor([list(ids[at : at + _PREFILL])], device=runner.device), logits=False)


def _last(runner: Runner, token: int) -> tuple[Tensor, Tensor]:
    """Read one token: logits ``[V]`` and state ``[d]`` after it."""
    step = runner.extend(torch.tensor([[token]], device=runner.device))
    assert step.logits is not None
    return step.logits[0, -1], step.hidden[0, -1]


def _finished(steps: Any) -> Any:
    """The value of a generator that is run to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
