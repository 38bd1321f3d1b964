"""Many rows of a pair through the real decode loop at once, for counts: the texts of ``Pair.generate``, several times
faster on a CPU. Each model runs once for all rows that wait for it; draws are addressed, so rows do not disturb each
other. For methods with one draft by the model, and rules that read the law or the gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import sprinter
from sprinter.decode.draft import AskDraft, AskScore, Draft, Record, Scores
from sprinter.decode.drafter import Model
from sprinter.decode.loop import Limits, decode
from sprinter.decode.row import Answer
from sprinter.decode.spec import Method
from sprinter.engine.ending import Ending
from sprinter.heads.features import DraftStep, read_features
from sprinter.laws import Sampling, entropy, process, raw_law
from sprinter.models.choose import make_runner
from sprinter.models.pair import LoadedModel
from sprinter.random import AddressedDraws, Purpose

READ = {"entropy": entropy, "max_prob": lambda law: law.amax(-1)}
Ask = AskDraft | AskScore


def serves(method: Method) -> bool:
    """Whether rows of this method can run together here."""
    known = {"gate", "uniform", "token_prob", "token_prob_processed"}
    known |= {name + law for name in READ for law in ("", "_processed")}
    return isinstance(method.drafter, Model) and method.drafter.drafts == 1 and method.needs <= known


class Side:
    """One model, and the text of each row."""

    def __init__(self, model: LoadedModel, rows: int, max_len: int, vocab: int) -> None:
        self.runner, self.vocab = make_runner(model.model, batch=rows, max_len=max_len), vocab
        self.texts: list[list[int]] = []

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read all prompts but their last tokens."""
        self.texts = [list(prompt) for prompt in prompts]
        self.runner.rewind([0] * self.runner.batch)
        self._extend({row: text[:-1] for row, text in enumerate(self.texts)}, logits=False)

    def read(self, asks: Mapping[int, Ask]) -> dict[int, tuple[Tensor, Tensor]]:
        """Logits ``[n, V]`` and states ``[n, d]`` after what each asking row has not read."""
        lengths = self.runner.lengths
        for row, ask in asks.items():
            self.texts[row] = [*self.texts[row][: ask.start], *ask.tokens]
            lengths[row] = min(lengths[row], ask.start)
        self.runner.rewind(lengths)
        return self._extend({row: self.texts[row][lengths[row] :] for row in asks})

    def _extend(
        self, feeds: Mapping[int, Sequence[int]], logits: bool = True
    ) -> dict[int, tuple[Tensor, Tensor]]:
        tokens = torch.zeros(self.runner.batch, max(map(len, feeds.values())), dtype=torch.long)
        counts = [len(feeds.get(row, ())) for row in range(self.runner.batch)]
        for row, feed in feeds.items():
            tokens[row, : len(feed)] = torch.tensor(feed)
        step = self.runner.extend(tokens, counts, logits=logits)
        if step.logits is None:
            return {}
        return {
            row: (step.logits[row, : counts[row], : self.vocab], step.hidden[row, : counts[row]])
            for row in feeds
        }


class Rows:
    """Runs texts of one pair, ``rows`` at a time."""

    def __init__(self, pair: sprinter.Pair, rows: int = 40, max_len: int = 384) -> None:
        assert pair.models.draft is not None
        self.pair, self.rows, vocab = pair, rows, pair.models.vocab_size
        self.target, self.draft = (
            Side(model, rows, max_len, vocab) for model in (pair.models.target, pair.models.draft)
        )

    def run(
        self, prompts: Sequence[Sequence[int]], method: Method, sampling: Sampling, new_tokens: int
    ) -> list[Record]:
        """Text i has seed i; the meter is complete. Prompts of like length run together."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, Record] = {}
        for first in range(0, len(order), self.rows):
            part = order[first : first + self.rows]
            records = self._together([prompts[i] for i in part], part, method, sampling, new_tokens)
            found |= dict(zip(part, records, strict=True))
        return [found[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _together(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        method: Method,
        sampling: Sampling,
        new_tokens: int,
    ) -> list[Record]:
        idle = [prompts[0]] * (self.rows - len(prompts))
        for side in (self.target, self.draft):
            side.begin([*prompts, *idle])
        eos, records = self.pair.models.target.eos_ids, [Record() for _ in prompts]
        draws = [AddressedDraws(seed) for seed in seeds]
        loops = [
            decode(prompt, method, Limits(new_tokens, Ending(len(prompt), eos)), one, record, True)
            for prompt, one, record in zip(prompts, draws, records, strict=True)
        ]
        asks = {row: ask for row, loop in enumerate(loops) if (ask := next(loop, None)) is not None}
        while asks:
            drafting = {row: ask for row, ask in asks.items() if isinstance(ask, AskDraft)}
            answers: Mapping[int, Answer]
            if drafting:
                answers = self._propose(drafting, method, sampling, draws, records)
            else:
                scoring = {row: ask for row, ask in asks.items() if isinstance(ask, AskScore)}
                answers = self._score(scoring, method, sampling)
            for row, answer in answers.items():
                try:
                    asks[row] = loops[row].send(answer)
                except StopIteration:
                    del asks[row]
        for record in records:
            record.count()
        return records

    def _propose(
        self,
        asks: Mapping[int, AskDraft],
        method: Method,
        sampling: Sampling,
        draws: Sequence[AddressedDraws],
        records: Sequence[Record],
    ) -> dict[int, Draft]:
        read, rows = self.draft.read(asks), list(asks)
        logits = torch.stack([read[row][0][-1] for row in rows])
        laws, raws = process(logits, sampling), raw_law(logits)
        signals = {name: each(raws) for name, each in READ.items() if name in method.needs}
        signals |= {
            f"{name}_processed": each(laws)
            for name, each in READ.items()
            if f"{name}_processed" in method.needs
        }
        if "gate" in method.needs:
            gate = self.pair.heads["gate"]
            hidden = torch.stack([read[row][1][-1] for row in rows])
            step = DraftStep(hidden, law=raws, temperature=torch.full((len(rows),), sampling.temperature))
            signals["gate"] = gate(read_features(gate.features, step))
        answers = {}
        for i, row in enumerate(rows):
            text = self.draft.texts[row]
            x = draws[row].token(laws[i], asks[row].round, len(text), Purpose.DRAFT)
            text.append(x)
            records[row].stats.draft_steps += 1
            own = {name: values[i : i + 1].double() for name, values in signals.items()}
            for name, law in (("token_prob", raws), ("token_prob_processed", laws)):
                if name in method.needs:
                    own[name] = law[i, x].double().unsqueeze(0)
            answers[row] = Draft(
                (x,), laws[i : i + 1], own, raws[i : i + 1] if method.accept.needs_raw else None
            )
        return answers

    def _score(self, asks: Mapping[int, AskScore], method: Method, sampling: Sampling) -> dict[int, Scores]:
        return {
            row: Scores(process(logits, sampling), raw_law(logits) if method.accept.needs_raw else None)
            for row, (logits, _) in self.target.read(asks).items()
        }
