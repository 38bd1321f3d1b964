"""Distils a draft from a target: texts, student, training, evaluation, card. Every stage resumes (``folder``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair, load_models
from sprinter.models.reduced_vocab import frequent_tokens
from sprinter.models.source import find
from sprinter.models.tokenizers import own_vocabulary, read_by
from sprinter.models.vocabulary import is_foreign
from sprinter.training.drafts.batches import in_order
from sprinter.training.drafts.data import Texts, TextsProgress, write_texts
from sprinter.training.drafts.eagle3 import mask_token
from sprinter.training.drafts.folder import TRAINING, Judging, check_folder, finish, run_facts, training_key
from sprinter.training.drafts.judge import OwnDrafts, accepted, by_task, overlaps
from sprinter.training.drafts.run import LossPoint, loss_temperature
from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings
from sprinter.training.drafts.student import (
    influential,
    make_student,
    save_student,
    size_of,
    spaced,
    takes_layers,
    transplanted,
)
from sprinter.training.drafts.train import settle_scale, train

__all__ = ["distill", "fresh_student"]

_SCALED_ON = 2048  # tokens


def distill(
    pair: Pair,
    weights: PreTrainedModel,
    data: Sequence[str | Path],
    out: str | Path,
    texts: TextSettings = TextSettings(),
    student: StudentSettings = StudentSettings(),
    training: TrainingSettings = TrainingSettings(),
    judging: Judging = Judging(),
    *,
    restart: bool = False,
    on_texts: Callable[[TextsProgress], None] | None = None,
    on_training: Callable[[LossPoint, int], None] | None = None,
) -> dict[str, Any]:
    """Make a draft model for a target.

    Args:
        pair: the target, which writes the texts and judges the draft; any weights that Sprinter runs.
        weights: the target in a floating-point dtype, where the student is trained: its embeddings and whole laws.
        data: prompts, see ``training.sources``.
        out: the draft's folder; an interrupted run in it is continued.
        texts, student, training, judging: settings of the stages.
        restart: delete an earlier run first.
        on_texts, on_training: progress callbacks.

    Returns:
        The facts of draft.json.

    Raises:
        UserError: what is wrong with data, settings or folder, and how to fix it.
    """
    folder = Path(out)
    check_folder(folder, restart, "draft")
    written = write_texts(pair, data, folder / "texts", texts, on_texts)
    fresh = fresh_student(pair, weights, written, student)
    judge = None
    if training.on_policy:
        judge = OwnDrafts(
            pair.models, written.part(False), training.gamma, texts.temperature, training.seed, top=texts.top
        )
    place = folder / TRAINING / training_key(written, student, training)
    run = train(
        fresh, written, training, place, parallel=student.parallel, on_policy=judge, progress=on_training
    )
    shape = {**asdict(student), "width": fresh.config.hidden_size, "parameters": size_of(fresh)}
    facts = {"student": shape, **run_facts(folder, written, training, run)}
    assert pair.tokenizer is not None
    save_student(fresh, pair.tokenizer, folder, pair.models.target.eos_ids)
    several = f"drafter=parallel(tokens={student.parallel}),stop=fixed(gamma={student.parallel})"
    facts["method"] = f"speculative(gamma={judging.gamma})" if student.parallel == 1 else several
    facts["tasks"] = _judged(pair, weights, written, folder, judging, facts["method"])
    return finish(folder, facts)


def fresh_student(
    pair: Pair, weights: PreTrainedModel, texts: Texts, settings: StudentSettings
) -> LlamaForCausalLM:
    """A student for these texts; a cut vocabulary holds the most frequent tokens of the target's answers.

    Raises:
        UserError: a shape that the target does not allow, a start that cannot be loaded, or a context that is too short
            for the texts.
    """
    kept = None
    if settings.vocabulary is not None:
        answers = (text.ids[text.prompt :] for text in texts.part(False))
        assert pair.tokenizer is not None
        words = max(pair.tokenizer.get_vocab().values()) + 1  # rows beyond these are padding
        kept = frequent_tokens(answers, settings.vocabulary, words, pair.models.target.eos_ids)
    student = _least_wrong(_started(pair, weights, settings), settings, kept, texts)
    if settings.parallel > 1:
        student.config.pard_token = mask_token(weights)
    room = int(student.config.max_position_embeddings)
    longest = max(len(text.ids) for text in texts.texts)
    if longest > room:
        raise UserError(
            f"the draft's context of {room} tokens is less than the longest text, {longest}: give a smaller "
            f"prompt_tokens or new_tokens, or context={longest}"
        )
    return student


def _least_wrong(
    start: PreTrainedModel, settings: StudentSettings, kept: Tensor | None, texts: Texts
) -> LlamaForCausalLM:
    """The student of spaced layers of its start, or that of influential ones: the nearer on one batch of texts."""
    part, temperature = texts.part(False), loss_temperature(TrainingSettings(), texts)
    choices = [spaced(start, settings.layers)]
    if takes_layers(start, settings):
        other = influential(start, settings.layers, next(in_order(part, _SCALED_ON)).ids)
        choices += [other] if len(other) == settings.layers and other != choices[0] else []
    found: list[tuple[float, LlamaForCausalLM]] = []
    for taken in choices:
        student = make_student(start, settings, kept, taken)
        found.append((settle_scale(student, part, _SCALED_ON, temperature), student))
    return min(found, key=lambda one: one[0])[1]


def _started(pair: Pair, weights: PreTrainedModel, settings: StudentSettings) -> PreTrainedModel:
    """The model whose embeddings and layers the student takes."""
    if settings.start is None:
        return weights
    options: dict[str, Any] = {"device": str(weights.device), "dtype": "float32", "dequantise": True}
    assert pair.tokenizer is not None
    try:
        words = own_vocabulary(find(settings.start, "start"), False)
        foreign = words is not None and is_foreign(pair.tokenizer.get_vocab(), words)
        # fewer tokens of the same vocabulary are refused
        models = load_models(settings.start, tokenizer=None if foreign else pair.tokenizer, **options)
    except UserError as error:
        raise UserError(
            f"a student cannot start from '{settings.start}': give a smaller model of text ({error})"
        ) from error
    start = models.target.module("the start of a student")
    if not foreign:
        return start
    assert models.tokenizer is not None
    tokens = read_by(pair.tokenizer, models.tokenizer)
    if tokens is None:
        raise UserError(
            f"a student cannot start from '{settings.start}', whose tokenizer has less than half of a text's tokens in "
            "common with the target's: give a model whose tokenizer is nearer"
        )
    return transplanted(start, tokens, weights.config)


def _judged(
    pair: Pair, weights: PreTrainedModel, texts: Texts, folder: Path, judging: Judging, method: str
) -> dict[str, dict[str, float]]:
    """β at the texts' temperature and of first choices, and accepted tokens a call, by task: of the saved weights."""
    held, temperature = texts.part(True), float(texts.info["settings"]["temperature"])
    assert pair.tokenizer is not None
    draft = load_models(folder, tokenizer=pair.tokenizer, device=str(weights.device), dtype="float32").target
    model = draft.module("a distilled draft")
    beta = overlaps(weights, model, held, temperature)
    first = {
        task: {"same_first_choice": row["beta"]} for task, row in overlaps(weights, model, held, 0.0).items()
    }
    both = Pair(LoadedPair(pair.models.target, draft, pair.tokenizer, pair.models.tokens))
    calls = accepted(both, held, method, temperature, judging)
    return by_task(beta, first, calls)
