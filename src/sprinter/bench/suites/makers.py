"""Make samples from records, with one function per kind of suite."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from sprinter.bench.sample import Sample, SampleCheck
from sprinter.bench.suites.chat import ask_for_choice, ask_for_code, ask_for_number, turns_of
from sprinter.bench.suites.entry import Making, SuiteRows
from sprinter.errors import UserError
from sprinter.training.sources import MESSAGES, SourceRecord, text_of

__all__ = [
    "code", "group_of_spec_bench", "judged_talks", "maths", "multiple_choice", "running_text", "shots",
    "talk", "talks",
]  # fmt: skip

_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_CALCULATOR = re.compile(r"<<[^<>]*=[^<>]*>>")  # GSM8K's calculator annotations
_ANSWER = re.compile(r"####\s*(-?[\d.,]*\d)")
_SHOTS = 5


def running_text(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """Beginnings of texts, with the continuations as references."""
    rule = making.rule
    for id, category, text in _texts((row for rows in sources for row in rows), making):
        prompt, rest = rule.cut(text, making.tokenizer)
        if prompt:
            yield Sample(id, category, (prompt,), (rest,) if rest else ())
        else:
            making.skipped["too_short" if text.strip() else "empty"] += 1


def talks(sources: list[SuiteRows], making: Making, field: str = "turns") -> Iterator[Sample]:
    """Prompts and conversations of several turns, as in Spec-Bench, MT-bench and Vicuna-bench."""
    for n, (where, record) in enumerate(sources[0], 1):
        if field == MESSAGES:
            yield conversation(record, where, _id(record, n), making.name)
            continue
        turns = text_of(record, field, where) if "." in field else _get(record, field, where)
        yield talk({**record, "turns": turns}, where, _id(record, n), making.name)


def judged_talks(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """MT-bench: conversations, with GPT-4's answers as references if there are any."""
    questions, answers = sources
    judged = {str(_get(r, "question_id", w)): _get(_get(r, "choices", w)[0], "turns", w) for w, r in answers}
    for n, (where, record) in enumerate(questions, 1):
        id = _id(record, n)
        yield talk({**record, "reference": judged.get(id, record.get("reference"))}, where, id, making.name)


def talk(record: SourceRecord, where: str, id: str, category: str) -> Sample:
    """Make a sample of a record with "turns" (a text, or a list of texts).

    "category", "reference" (or "answer") and "check" ("number", "choice" or "text": how the answer is compared with the
    reference) are optional.
    """
    turns = _get(record, "turns", where)
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise UserError(f"the prompt of {where} must be a text, or a list of texts: fix the record")
    references = _references(record.get("reference", record.get("answer")), len(turns))
    category = str(record.get("category") or category)
    return Sample(id, category, tuple(turns), references, _check(record, references, where))


def _check(record: SourceRecord, references: Sequence[str], where: str) -> SampleCheck | None:
    """How an answer is checked: as "check" says, or by the number that the reference ends in after "####"."""
    answer = _number(references[0]) if len(references) == 1 else None
    kind = record.get("check")
    if kind is None:
        return SampleCheck("number", answer) if answer else None
    if kind not in ("number", "choice", "text"):
        raise UserError(f"'check' of {where} is {str(kind)[:40]!r}: give number, choice or text")
    if len(references) != 1:
        raise UserError(f"'check' of {where} has no answer to compare with: give the record an \"answer\"")
    return SampleCheck(kind, answer if kind == "number" and answer else references[0].strip())


def conversation(record: SourceRecord, where: str, id: str, category: str) -> Sample:
    """Make a sample of a record with "messages": the user's are the turns, the assistant's the references."""
    messages = _get(record, MESSAGES, where)
    system, turns, references = turns_of(messages if isinstance(messages, list) else [messages], where)
    made = talk({**record, "turns": [*turns], "reference": [*references]}, where, id, category)
    return replace(made, system=system)


def maths(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """GSM8K: "question", "answer" that ends in "#### N"."""
    for n, (where, record) in enumerate(sources[0]):
        solution = text_of(record, "answer", where)
        answer = _number(solution)
        if answer is None:
            raise UserError(f"'answer' of {where} does not end in '#### NUMBER': fix the record")
        question = text_of(record, "question", where).strip()
        prompt = ask_for_number(question) if making.chat else f"Question: {question}\nAnswer:"
        reference = _CALCULATOR.sub("", solution).strip()
        yield Sample(str(n), making.name, (prompt,), (reference,), SampleCheck("number", answer))


def code(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """HumanEval: the prompt, its test, and the function that the test calls."""
    for where, record in sources[0]:
        names = ("prompt", "test", "entry_point", "canonical_solution", "task_id")
        prompt, test, entry, solution, id = (text_of(record, name, where) for name in names)
        check = SampleCheck("code", test, entry, prompt if making.chat else "")
        yield Sample(id, making.name, (ask_for_code(prompt) if making.chat else prompt,), (solution,), check)


def multiple_choice(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """CommonsenseQA: the question, its choices with letters, and the right letter."""
    for where, record in sources[0]:
        question, choices = _stem_and_choices(record, where)
        letter = text_of(record, "answerKey", where)
        asked, check = f"Question: {_asked(question, choices)}", SampleCheck("choice", letter)
        prompt = ask_for_choice(asked) if making.chat else asked
        yield Sample(text_of(record, "id", where), making.name, (prompt,), check=check)


def shots(sources: list[SuiteRows], making: Making) -> Iterator[Sample]:
    """MMLU: up to five solved questions of the subject, then the question (Hendrycks et al., 2021)."""
    questions, examples = sources
    solved: dict[str, list[str]] = {}
    for where, record in examples:
        subject, letter = text_of(record, "subject", where), _letter(record, where)
        solved.setdefault(subject, []).append(f"{_mmlu(record, where)} {letter}")
    counts: Counter[str] = Counter()
    for where, record in questions:
        subject = text_of(record, "subject", where)
        number, about = counts[subject], subject.replace("_", " ")
        counts[subject] += 1
        title = f"The following are multiple choice questions (with answers) about {about}."
        parts = [title, *solved.get(subject, [])[:_SHOTS], _mmlu(record, where)]
        check = SampleCheck("choice", _letter(record, where))
        asked = "\n\n".join(parts)
        prompt = ask_for_choice(asked, after_others=len(parts) > 2) if making.chat else asked
        yield Sample(f"{subject}/{number}", subject, (prompt,), check=check)


def group_of_spec_bench(category: str) -> str:
    """Spec-Bench's group of a category; the categories of MT-bench form one of its six groups."""
    return "mt_bench" if category in _MT_BENCH else category


def _texts(rows: SuiteRows, making: Making) -> Iterator[tuple[str, str, str]]:
    """Yield id, category and text; with paragraphs the first of each text, then the second of each, and so on."""
    texts = (_text(record, n, where, making) for n, (where, record) in enumerate(rows, 1))
    if not making.rule.paragraphs:
        yield from texts
        return
    usable: list[list[tuple[str, str, str]]] = []
    for id, category, text in texts:
        lines = [line.strip() for line in text.split("\n")]
        long = [line for line in lines if len(line.split()) >= making.rule.min_words]
        making.skipped["too_short"] += sum(map(bool, lines)) - len(long)
        usable.append([(f"{id}.{n}", category, line) for n, line in enumerate(long)])
    for column in zip_longest(*usable):
        yield from (part for part in column if part is not None)


def _text(record: SourceRecord, number: int, where: str, making: Making) -> tuple[str, str, str]:
    text = text_of(record, making.text_field, where)
    return _id(record, number), str(record.get("category") or making.name), text


def _id(record: SourceRecord, number: int) -> str:
    """Id of a record: its own, otherwise its number."""
    id = record.get("question_id", record.get("id"))
    return str(number if id is None else id)


def _references(value: Any, turns: int) -> tuple[str, ...]:
    """One reference per turn; of several right answers the first."""
    if not value:
        return ()
    firsts: Sequence[Any] = [value] if isinstance(value, str) else value
    texts = [str(one[0] if one else "") if isinstance(one, list) else str(one) for one in firsts]
    return tuple(_CALCULATOR.sub("", text) for text in (texts + [""] * turns)[:turns])


def _number(text: str) -> str | None:
    found = _ANSWER.search(text)
    return found[1].replace(",", "") if found else None


def _stem_and_choices(record: SourceRecord, where: str) -> tuple[str, list[tuple[str, str]]]:
    """Question and choices; the original nests the choices in the question, the hub's copy has a separate field."""
    holder = record["question"] if isinstance(record.get("question"), dict) else record
    question = text_of(holder, "stem" if "stem" in holder else "question", where)
    choices = _get(holder, "choices", where)
    if isinstance(choices, dict):
        return question, list(zip(choices["label"], choices["text"], strict=True))
    return question, [(_get(choice, "label", where), _get(choice, "text", where)) for choice in choices]


def _mmlu(record: SourceRecord, where: str) -> str:
    choices = list(zip("ABCD", _get(record, "choices", where), strict=False))
    return _asked(text_of(record, "question", where), choices)


def _asked(question: str, choices: Iterable[tuple[str, str]]) -> str:
    lines = [question.strip(), *(f"{letter}. {text}" for letter, text in choices), "Answer:"]
    return "\n".join(lines)


def _letter(record: SourceRecord, where: str) -> str:
    answer = _get(record, "answer", where)
    return "ABCD"[answer] if isinstance(answer, int) else str(answer)


def _get(record: SourceRecord, name: str, where: str) -> Any:
    if not isinstance(record, dict) or name not in record:
        raise UserError(f"{where} has no field '{name}': is this the suite's file?")
    return record[name]
