"""Mine harmless tokens: which of the draft's first choices can replace the target's without changing the answer?

AutoJudge (arXiv 2504.20039), Algorithm 1: where the draft's first choice differs from the target's greedy answer, put
it there, let the target continue greedily, and compare the final answers. If they are the same, the token is harmless
and stays in the text; else the text goes on as it was. The target's states before and after each such token are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sprinter.decode.checks import between, positive
from sprinter.decode.spec import parse_method
from sprinter.engine.pair import Pair
from sprinter.engine.prompt import encode_prompt
from sprinter.engine.scoring import finished, score_texts
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.training.examples import Example, ExampleEncoder
from sprinter.training.shards import save_bytes

__all__ = ["MineSettings", "Mined", "mine", "read_mined"]

_INFO, _PART = "mined.json", "part-{:05}.safetensors"
_COLUMNS = ("prompt", "position", "token", "instead", "same", "log_p", "before", "after", "answered")
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
        positive(self, "new_tokens", "rows", "limit")
        between("share", self.share, 0.001, 1.0)


@dataclass(frozen=True, slots=True)
class Mined:
    """n tokens that were tried.

    Attributes:
        prompt, position: ``[n]`` int64, the token's prompt and place in the answer, from 0.
        token, instead: ``[n]`` int64, the target's own token and the draft's.
        same: ``[n]`` bool, whether the answer stayed the same.
        log_p: ``[n]`` float32, ln p of the draft's token, p at temperature 1.
        before, after: ``[n, d]`` float32, the target's state that gives p, and after the draft's token.
        info: models, settings and counts; ``answered`` prompts have an answer, the others of ``prompts`` have not.
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


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt, its number in the data, and tokens that end the turn beside EOS."""

    number: int
    ids: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(slots=True)
class _Attempted:
    """A prompt with its answer as it stands, and what was tried in it."""

    prompt: int
    start: int
    ids: list[int]
    ends: tuple[int, ...]
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
    if not parse_method(settings.method).lossless(greedy=True):
        raise UserError(
            f"method {settings.method} is lossy, and answers must be the target's: give a lossless method"
        )
    prompts, skipped = _prompts(pair, examples, settings)
    digest = hashlib.sha256(json.dumps([asdict(one) for one in prompts]).encode()).hexdigest()
    info = {
        **{
            f"{which}_{key}": value
            for which, model in (("target", models.target), ("draft", models.draft))
            for key, value in (
                ("id", model.id),
                ("revision", model.revision),
                ("fingerprint", weights_fingerprint(model.model)),
                ("weights", model.weights),
            )
        },
        "hidden_size": models.target.hidden_size,
        "prompts": len(prompts),
        "prompts_sha256": digest,
        "skipped": skipped,
        "settings": asdict(settings),
    }
    longest = max(len(one.ids) for one in prompts) + settings.new_tokens
    miner = _Miner(pair, answer, settings, longest)
    _begin(directory, info)
    tried = 0
    for number, at in enumerate(range(0, len(prompts), settings.rows)):
        part = directory / _PART.format(number)
        found = _read_part(part)
        if found is None:
            found = miner.group(prompts[at : at + settings.rows])
            save_bytes(part, save(found))
        tried += len(found["prompt"])
        if progress is not None:
            progress(min(at + settings.rows, len(prompts)), len(prompts), tried)
    return info


def _prompts(
    pair: Pair, examples: Sequence[Example], settings: MineSettings
) -> tuple[list[_Question], dict[str, int]]:
    """The prompts that fit, and how many do not, by reason."""
    encoder = ExampleEncoder(pair.models, settings.new_tokens)
    found: list[_Question] = []
    skipped: dict[str, int] = {}
    for number, one in enumerate(examples):
        reason, ids, length = encoder(replace(one, answer=None))
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            ends = () if isinstance(one.prompt, str) else encode_prompt(one.prompt, pair.models).ends
            found.append(_Question(number, tuple(ids[:length]), tuple(ends)))
    if not found:
        raise UserError(f"none of {len(examples)} prompts fits: give shorter prompts or fewer new tokens")
    return found[: settings.limit], skipped


def _read_part(path: Path) -> dict[str, Tensor] | None:
    """The columns of a group; None if it is not there, or cannot be read."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError):
        return None
    return found if found.keys() == set(_COLUMNS) else None


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
    parts = [_read_part(folder / _PART.format(number)) for number in range(groups)]
    columns = [part for part in parts if part is not None]
    if len(columns) < groups:
        raise UserError(
            f"mining into '{directory}' was interrupted ({groups - len(columns)} of {groups} parts are missing or "
            "damaged): give the same 'sprinter gate mine' again to continue"
        )
    joined = {name: torch.cat([one[name] for one in columns]) for name in _COLUMNS}
    answered = joined.pop("answered")
    return Mined(**joined, info={**info, "answered": int(answered.sum())})


def _read_info(directory: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((directory / _INFO).read_text())
        if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
            raise ValueError("it does not describe mined tokens")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read '{directory / _INFO}' ({error}): mine into another directory") from None


def _begin(directory: Path, info: dict[str, Any]) -> None:
    known = _read_info(directory)
    if known is not None:
        before, now = ({**one, **one["settings"], "settings": None} for one in (known, info))
        for key, value in now.items():
            if before.get(key) != value:
                raise UserError(
                    f"'{directory}' holds tokens that were mined with another {key.replace('_', ' ')}: "
                    "give another --out, or remove it"
                )
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"'{directory}' holds something else: give a new directory")
    save_bytes(directory / _INFO, json.dumps(info, indent=2) + "\n")


class _Miner:
    """Mines groups of prompts."""

    def __init__(
        self, pair: Pair, answer: Callable[[str], Hashable | None], settings: MineSettings, longest: int
    ) -> None:
        assert pair.models.draft is not None
        self._pair, self._answer, self._settings = pair, answer, settings
        self._ends = frozenset(pair.models.target.eos_ids)
        self._draft = make_runner(pair.models.draft.model, max_len=longest)
        self._target = make_runner(pair.models.target.model, max_len=longest)

    def group(self, prompts: Sequence[_Question]) -> dict[str, Tensor]:
        """The columns of a group."""
        settings = self._settings
        ends = [one.ends for one in prompts]
        answers = self._continue(
            [list(one.ids) for one in prompts], [settings.new_tokens] * len(prompts), ends
        )
        texts = []
        for one, new in zip(prompts, answers, strict=True):
            said = self._said(new)
            if self._ended(new, one.ends) and said is not None:
                text = _Attempted(one.number, len(one.ids), [*one.ids, *new], one.ends, said)
                text.firsts = self._firsts(text)
                texts.append(text)
        live = list(texts)
        while live := [text for text in live if self._next(text)]:
            swapped = [[*text.ids[: text.start + text.at], text.firsts[text.at]] for text in live]
            room = [
                settings.new_tokens - (len(ids) - text.start) for ids, text in zip(swapped, live, strict=True)
            ]
            after = self._continue(swapped, room, [text.ends for text in live])
            for text, ids, new in zip(live, swapped, after, strict=True):
                whole = [*ids, *new]
                own, instead = text.ids[text.start + text.at], ids[-1]
                ended = self._ended(whole[text.start :], text.ends)
                same = ended and self._said(whole[text.start :]) == text.answer
                if ended:  # else it is not known what it would have said
                    text.tried.append((text.at, own, instead, same))
                text.at += 1
                if same:
                    text.ids = whole
                    text.firsts = self._firsts(text)
        return {**self._columns(texts), "answered": torch.tensor([len(texts)])}

    def _ended(self, new: Sequence[int], ends: Sequence[int]) -> bool:
        return bool(new) and (new[-1] in self._ends or new[-1] in ends)

    def _continue(
        self, prompts: list[list[int]], room: list[int], ends: Sequence[tuple[int, ...]]
    ) -> list[list[int]]:
        """The target's greedy continuations; none where the text has ended or has no room."""
        full = self._settings.new_tokens
        open_ = [
            i
            for i, ids in enumerate(prompts)
            if room[i] == full or (room[i] > 0 and not self._ended(ids, ends[i]))
        ]
        found: list[list[int]] = [[] for _ in prompts]
        if open_:
            made = self._pair.generate_batch(
                [prompts[i] for i in open_], method=self._settings.method, temperature=0.0,
                max_new_tokens=[room[i] for i in open_], rows=min(len(open_), self._settings.rows),
                stop_token_ids=[list(ends[i]) for i in open_], require_lossless=True,
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
        (scored,) = finished(score_texts(self._draft, [given], self._pair.models.vocab_size, top=1))
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
            "before": before.float(), "after": after.float(),
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
