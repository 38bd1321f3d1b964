"""Distils a draft from a target: texts, student, training, evaluation, card. Every stage resumes (``folder``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.models.common_tokens import words_of
from sprinter.models.pair import LoadedPair, load_models
from sprinter.models.reduced_vocab import CutHead, frequent_tokens
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
    FAMILIES,
    check_shape,
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
_log = logging.getLogger("sprinter")


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
    start = _started(pair, weights, student)  # before anything is deleted, and before hours of writing
    check_folder(folder, restart, "draft")
    written = write_texts(pair, data, folder / "texts", texts, on_texts)
    fresh = fresh_student(pair, weights, written, student, start)
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
    pair: Pair,
    weights: PreTrainedModel,
    texts: Texts,
    settings: StudentSettings,
    start: PreTrainedModel | None = None,
) -> LlamaForCausalLM:
    """A student for these texts; a cut vocabulary holds the most frequent tokens of the target's answers.

    Args:
        start: the model of ``settings.start``, with the target's vocabulary; None: it is loaded.

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
    start = _started(pair, weights, settings) if start is None else start
    student = _least_wrong(start, settings, kept, texts)
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
    """The model whose embeddings and layers the student takes; says so if it can take no layers."""
    start, name = weights, pair.models.target.id
    _check_output(weights, name)
    if settings.start is not None:
        start, name = _loaded(pair, weights, settings.start), settings.start
    check_shape(start, settings)
    if not takes_layers(start, settings):
        kind = start.config.get_text_config(decoder=True).model_type
        _log.warning(
            "the student's layers start at random, and only its embeddings are those of %s (%s): layers are taken from "
            "models of %s, at their own width",
            name, kind, ", ".join(FAMILIES),
        )  # fmt: skip
    return start


def _loaded(pair: Pair, weights: PreTrainedModel, name: str) -> PreTrainedModel:
    """A model to start from, with the target's vocabulary."""
    options: dict[str, Any] = {"device": str(weights.device), "dtype": "float32", "dequantise": True}
    assert pair.tokenizer is not None
    spoken, words = pair.tokenizer.get_vocab(), own_vocabulary(find(name, "start"), False)
    # more tokens than the target's are of no harm, fewer would leave some without an embedding
    foreign = words is not None and (is_foreign(spoken, words) or max(words.values()) < max(spoken.values()))
    try:
        models = load_models(name, tokenizer=None if foreign else pair.tokenizer, **options)
    except UserError as error:
        why = str(error).replace("the target", "the start")  # as a single model is called there
        raise UserError(f"a student cannot start from '{name}': give another model ({why})") from error
    start = models.target.module("the start of a student")
    _check_output(start, name)
    if not foreign:
        return start
    assert models.tokenizer is not None
    if (tokens := read_by(pair.tokenizer, models.tokenizer)) is not None:
        return transplanted(start, tokens, weights.config)
    why = "has less than half of a text's tokens in common with the target's"
    for who, tokenizer in (("it", models.tokenizer), ("the target's", pair.tokenizer)):
        if words_of(tokenizer) is None:
            why = f"is not the target's, and {who} is neither byte-level BPE nor SentencePiece"
    raise UserError(
        f"a student cannot start from '{name}', whose tokenizer {why}: give a model with the target's or a nearer one"
    )


def _check_output(model: PreTrainedModel, name: str) -> None:
    """Refuse a draft whose output layer is cut: a student takes an embedding of every token from it."""
    if isinstance(model.get_output_embeddings(), CutHead):  # type: ignore[no-untyped-call]
        raise UserError(
            f"a student cannot start from '{name}', a draft of a reduced vocabulary: give one made without --vocabulary"
        )


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
