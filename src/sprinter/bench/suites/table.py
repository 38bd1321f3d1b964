"""The named suites: their files, their data sets on the hub, and how their prompts are made."""

from __future__ import annotations

import csv
import io
import tarfile
import zlib
from typing import Any

from sprinter.bench.suites import heldout, makers
from sprinter.bench.suites.chat import CHOICE_RULE, CODE_RULE, MATHS_RULE
from sprinter.bench.suites.entry import Entry, Hub, SuiteRows, SuiteSource
from sprinter.bench.suites.rule import TextRule
from sprinter.decode.registry import Registry
from sprinter.errors import UserError
from sprinter.training.sources import SourceRecord

__all__ = ["SUITES"]

SUITES = Registry("suite", "sprinter.bench_suites")
"""Functions that return a suite's ``Entry``, by name."""

PAPER_TOKENS = 20  # SPRINTER, section 4
TURN_TOKENS = 128  # what most work on speculative decoding generates (SVIP, section 3.2)
_FASTCHAT = "https://raw.githubusercontent.com/lm-sys/FastChat/main/fastchat/llm_judge/data/"
_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
_FIRST_UNSEEN = 61_000  # the built-in pair was trained on articles of Wikipedia below this number
_FIRST_WORDS = TextRule()
_PARAGRAPHS = TextRule(words=200, min_words=60, paragraphs=True)


def _question_tar(name: str) -> SuiteRows:
    """MMLU's questions: a tar of CSV files without headers, one per subject; question, four choices, right letter."""
    try:
        with tarfile.open(name) as tar:
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                file = tar.extractfile(member)
                if file is not None and member.name.endswith(".csv"):
                    yield from _questions(file.read().decode(), member.name, name)
    except (tarfile.TarError, csv.Error, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read '{name}' ({first}): fetch the file again") from None


def _questions(text: str, member: str, name: str) -> SuiteRows:
    subject = member.rpartition("/")[2].removesuffix(".csv").rpartition("_")[0]
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        where = f"row {number} of {member} in '{name}'"
        if len(row) != 6:
            raise UserError(f"{where} has {len(row)} fields, not 6: fetch the file again")
        yield where, {"subject": subject, "question": row[0], "choices": row[1:5], "answer": row[5]}


def _beyond_training(record: SourceRecord) -> bool:
    return int(record["id"]) > _FIRST_UNSEEN


def _json(address: str) -> Hub:
    return Hub("json", data_files=address)


def _continued(about: str, *sources: SuiteSource, rule: TextRule = _FIRST_WORDS) -> Entry:
    return Entry(f"{about}, continued", sources, makers.running_text, PAPER_TOKENS, rule)


def _talks(about: str, *sources: tuple[str, str], **options: Any) -> Entry:
    parts = tuple(SuiteSource((name,), _json(address)) for name, address in sources)
    make = makers.judged_talks if len(parts) == 2 else makers.talks
    return Entry(about, parts, make, TURN_TOKENS, "prompts as they are", grouped=True, chat=True, **options)


_WIKIPEDIA = SuiteSource(
    tuple(f"wikipedia_en_2015_{n:02d}.txt.gz" for n in range(6)),
    Hub("wikimedia/wikipedia", config="20231101.en", most=2000, keep=_beyond_training),
    heldout.wikipedia,
)
_WIKINEWS = SuiteSource(  # on the hub articles after the dump of the training data
    tuple(f"wikinews_en_2022_{n:02d}.jsonl.gz" for n in range(2)),
    Hub("malteos/wikinews", data_files="en/*2023*.parquet", text="cleaned_text"),
    heldout.wikinews,
)
_UNSEEN = "that the built-in pair was not trained on"

_NAMED = {
    "wiki-summary": _continued(
        "summaries of Wikipedia articles",
        SuiteSource(
            ("wikipedia_summary_1k.txt",),
            Hub("jordiclive/wikipedia-summary-dataset", text="summary", most=2000),
        ),
    ),
    "lm1b": _continued(
        "news sentences of the One Billion Word benchmark",
        SuiteSource(("lm1b_sample_dev.txt.gz",), Hub("dvruette/lm1b", "test", most=20_000)),
    ),
    "heldout": _continued(
        f"paragraphs of Wikipedia and Wikinews {_UNSEEN}", _WIKIPEDIA, _WIKINEWS, rule=_PARAGRAPHS
    ),
    "wikipedia": _continued(f"paragraphs of Wikipedia {_UNSEEN}", _WIKIPEDIA, rule=_PARAGRAPHS),
    "wikinews": _continued(f"paragraphs of Wikinews {_UNSEEN}", _WIKINEWS, rule=_PARAGRAPHS),
    "tinystories": _continued(
        f"simple stories {_UNSEEN}",
        SuiteSource(
            ("tinystories_sample.txt.gz",),
            Hub("roneneldan/TinyStories", "validation", most=2000),
            heldout.stories,
        ),
    ),
    "spec-bench": _talks(
        "six groups of prompts: talks, translation, summaries, questions, mathematics, retrieval (Spec-Bench)",
        ("specbench_question.jsonl", _SPEC_BENCH),
        group=makers.group_of_spec_bench,
    ),
    "mt-bench": _talks(
        "talks of two turns in eight categories, with GPT-4's answers to some (MT-bench)",
        ("mtbench_question.jsonl", f"{_FASTCHAT}mt_bench/question.jsonl"),
        ("mtbench_reference_gpt4.jsonl", f"{_FASTCHAT}mt_bench/reference_answer/gpt-4.jsonl"),
    ),
    "vicuna": _talks(
        "single questions in nine categories (Vicuna-bench)",
        ("vicuna_bench_question.jsonl", f"{_FASTCHAT}vicuna_bench/question.jsonl"),
    ),
    "gsm8k": Entry(
        "word problems of grade school, the answer a number (test set)",
        (SuiteSource(("gsm8k_test.jsonl",), Hub("openai/gsm8k", "test", config="main")),),
        makers.maths, 256, "Question: ... Answer:", chat_rule=MATHS_RULE,
    ),
    "humaneval": Entry(
        "Python functions to write, with tests",
        (SuiteSource(("humaneval.jsonl",), Hub("openai/openai_humaneval", "test")),),
        makers.code, 256, "prompts as they are", chat_rule=CODE_RULE,
    ),
    "commonsenseqa": Entry(
        "questions of common sense with five choices",
        (SuiteSource(("commonsenseqa_dev.jsonl",), Hub("tau/commonsense_qa", "validation")),),
        makers.multiple_choice, 32, "Question: ..., choices with letters, Answer:", chat_rule=CHOICE_RULE,
    ),
    "mmlu": Entry(
        "questions from 57 subjects with four choices, after up to five solved ones",
        tuple(
            SuiteSource((f"mmlu_{split}.tar.gz",), Hub("cais/mmlu", split, config="all"), _question_tar)
            for split in ("test", "dev")
        ),
        makers.shots, 32, "up to five solved questions of the subject, choices with letters, Answer:", grouped=True,
        chat_rule=CHOICE_RULE,
    ),
}  # fmt: skip

for _name, _entry in _NAMED.items():
    SUITES.add(_name, lambda entry=_entry: entry)
