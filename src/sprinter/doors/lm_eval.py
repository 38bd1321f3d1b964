"""Sprinter inside lm-evaluation-harness: ``--model sprinter``, and what ``sprinter eval`` runs.

Log-likelihoods are those of the target alone; ``generate_until`` decodes by the method. The results JSON has, under
"config", the method with its drift, coverage and target calls a token over all answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm

from sprinter.bench.journal import Memory, hash_of
from sprinter.bench.statistics import ratio_of_sums
from sprinter.engine.engine import Engine
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationOptions
from sprinter.engine.pair import Pair, load_pair
from sprinter.engine.record import fingerprints, versions
from sprinter.engine.scoring import finished, score_texts
from sprinter.errors import SprinterError, UserError
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.memory import check_memory
from sprinter.random import drawn_seed, following_seed

__all__ = ["TASKS", "SprinterLM", "evaluate", "find_tasks", "register"]

_log = logging.getLogger("sprinter")

TASKS = Path(__file__).with_name("tasks")
"""Tasks over files, for use without a network: gsm8k, commonsenseqa, mmlu, mmlu_written, humaneval."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class _Asked(NamedTuple):
    """A request for an answer: the key under which it is kept, the prompt and how much of it was cut, the options."""

    key: str
    ids: list[int]
    cut: int
    options: GenerationOptions


class SprinterLM(TemplateLM):
    """A pair as a model of the harness.

    Args:
        target, draft: as in ``load_pair``; without both, the built-in pair.
        pair: a pair that is loaded already, in place of ``target`` and ``options``.
        method: as in ``GenerationOptions``; None: the default, exact and never slower than plain decoding.
        budget, require_lossless, seed: as in ``GenerationOptions``.
        batch_size: rows that share passes.
        max_gen_toks: of a task that names no limit.
        max_length: tokens of prompt and answer; None: the models' context. Longer prompts lose their beginning.
        kept: answers and log-likelihoods that are known, and where new ones are put as they come
            (``bench.journal.replies``: a file). Log-likelihoods in it serve all methods.
        options: of ``load_pair``, such as ``gate``, ``dtype``, ``runner``.

    Raises:
        UserError: as ``load_pair``; a pair without a tokenizer.
    """

    def __init__(
        self,
        target: Any = None,
        draft: Any = None,
        *,
        pair: Pair | None = None,
        method: str | None = None,
        budget: float | None = None,
        require_lossless: bool = False,
        seed: int = 0,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        kept: Memory | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal():
            raise UserError(f"batch_size={batch_size!r} is not a number of rows: give one, such as 8")
        self.pair = load_pair(target, draft, **options) if pair is None else pair
        if self.pair.tokenizer is None:
            raise UserError("the pair has no tokenizer: give tokenizer=...")
        self.tokenizer = cast(Any, self.pair.tokenizer)
        self._decoding: dict[str, Any] = {
            "method": method,
            "budget": budget,
            "require_lossless": require_lossless,
        }
        self._method = self.pair.method_for(method=method, budget=budget, require_lossless=require_lossless)
        self._seed = drawn_seed(seed)
        self._rows, self._most = max(1, int(batch_size)), max_gen_toks
        own = self.pair.models.context
        self.max_length = own if max_length is None else min(own, max_length)
        self._kept = Memory(lambda row: str(row["key"])) if kept is None else kept
        self._made_by = {
            **fingerprints(self.pair.models, self.pair.heads, self.pair.drafting), **versions()
        }  # fmt: skip
        self._answers: list[dict[str, Any]] = []  # task, question, and counts of each

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return (
            self.pair.models.target.eos_ids[0]
            if self.pair.models.target.eos_ids
            else self.tokenizer.eos_token_id
        )

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is scored behind: BOS where there is one."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of prompts that a chat template has written."""
        return self.pair.models.target.id.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; BOS is not added twice."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.bos_token)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the tokenizer's chat template writes them; without the prompt of an answer, the last message is
        continued.

        Raises:
            UserError: the tokenizer has none.
        """
        if self.tokenizer.chat_template is None:
            raise UserError(
                "the target's tokenizer has no chat template: evaluate it without one (no --chat)"
            )
        if not add_generation_prompt:
            return cast(str, self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, continue_final_message=True
            ))  # fmt: skip
        return cast(
            str, self.tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=True)
        )

    # --- likelihoods, of the target alone -----------------------------------------------------------------------------
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        texts = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens exceeds {self.max_length}: it cannot be scored"
                )
            room = self.max_length + 1 - len(continuation)  # the last token is not fed
            texts.append((context[-room:], continuation))
        if cut := sum(
            len(mine) < len(whole) for (mine, _), (_, whole, _) in zip(texts, requests, strict=True)
        ):
            _log.warning(
                "%d of %d contexts are longer than the models' and lose their beginning", cut, len(texts)
            )
        results: dict[int, tuple[float, bool]] = {}
        for i, answer in self._scored(texts, disable_tqdm):
            self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            results[i] = answer
        return [results[i] for i in range(len(texts))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, in windows of the longest context, each token predicted once."""
        texts: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []  # which text a window is of
        for number, (string,) in enumerate(one.args for one in requests):
            ids = self.tok_encode(string, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            texts += [make_disjoint_window(one) for one in windows]
            owners += [number] * (len(texts) - len(owners))
        sums, left = [0.0] * len(requests), Counter(owners)
        for i, (value, _) in self._scored(texts, disable_tqdm):
            sums[number := owners[i]] += value
            left[number] -= 1
            if not left[number]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, sums[number])
        return sums

    def _scored(
        self, texts: Sequence[tuple[list[int], list[int]]], quiet: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Index, ln p and whether it is greedy, of continuations as they come; the longest come first.

        Texts of like length share passes; continuations of one token behind the same text share its pass.
        """
        models = self.pair.models
        target = [self._made_by[name] for name in ("target", "tokenizer", *versions())]
        groups: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        keys = [hash_of(["ln p", target, *one]) for one in texts]
        with tqdm(total=len(texts), desc="log-likelihoods", disable=quiet) as bar:
            for i, (context, new) in enumerate(texts):
                if (row := self._kept.get(keys[i])) is not None:
                    bar.update()
                    yield i, (row["logprob"], row["greedy"])
                else:
                    groups[(*context, *new[:-1]), 0 if len(new) == 1 else i + 1].append(i)
            one_row = runner_kind(models.target.model)[0] == "crop"
            order = sorted(groups, key=lambda key: (key[1] > 0, len(key[0]), key[0]), reverse=True)
            while order:
                alike = [
                    key for key in order[: 1 if one_row else self._rows] if (key[1] > 0) == (order[0][1] > 0)
                ]
                del order[: len(alike)]
                longest = len(alike[0][0]) + 1
                check_memory([models.target.model], len(alike), [longest])
                runner = make_runner(models.target.model, batch=len(alike), max_len=longest)
                top = 1 if alike[0][1] else models.vocab_size
                part = [texts[groups[key][0]] for key in alike]
                for key, scored in zip(
                    alike, finished(score_texts(runner, part, models.vocab_size, top=top)), strict=True
                ):
                    for i in groups[key]:
                        new = texts[i][1]
                        value = float(scored.logprobs.sum())
                        if len(new) == 1:
                            value = float(scored.top_logprobs[0][scored.top_ids[0] == new[0]])
                        answer = value, scored.top_ids[:, 0].tolist() == new
                        self._kept.add({"key": keys[i], "logprob": answer[0], "greedy": answer[1]})
                        bar.update()
                        yield i, answer

    # --- answers, by the method ---------------------------------------------------------------------------------------
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers by the method, each up to a stop string; a row that is free takes the next request.

        Raises:
            UserError: a setting that is not honoured, or a prompt without room; before anything is decoded.
            SprinterError: an answer failed; those that were finished are kept.
        """
        repeats: Counter[str] = Counter()
        asked = [self._asked(one, repeats) for one in requests]
        answers: dict[int, str] = {}
        with tqdm(total=len(requests), desc=f"answers by {self._method.name}", disable=disable_tqdm) as bar:
            for i, row in self._answered(requests, asked):
                answers[i] = postprocess_generated_text(row["answer"], list(asked[i].options.stop), None)
                of = {
                    "task": requests[i].task_name,
                    "question": requests[i].doc_id,
                    "cut_prompts": asked[i].cut > 0,
                }
                self._answers.append({**of, **row["counts"]})
                self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                bar.update()
        return [answers[i] for i in range(len(requests))]

    def _answered(
        self, requests: Sequence[Instance], asked: Sequence[_Asked]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Index and kept row of answers: those that are known, then new ones as they come."""
        new = []
        for i, one in enumerate(asked):
            if (row := self._kept.get(one.key)) is not None:
                yield i, {**row, "counts": {**row["counts"], "known": 1}}
            else:
                new.append(i)
        if not new:
            return
        new.sort(key=lambda i: -len(asked[i].ids))
        longest = max(len(asked[i].ids) + cast(int, asked[i].options.max_new_tokens) for i in new)
        with Engine(self.pair, rows=min(self._rows, len(new)), max_len=longest) as engine:
            numbers = {engine.add(asked[i].ids, asked[i].options): i for i in new}
            while engine.unfinished:
                for event in engine.step():
                    i = numbers[event.id]
                    if event.error is not None:
                        which = f"question {requests[i].doc_id} of {requests[i].task_name}"
                        raise SprinterError(f"{which}: {event.error}") from event.error
                    if event.generation is not None:
                        row = {
                            "key": asked[i].key,
                            "answer": event.generation.text,
                            "counts": _counts(event.generation),
                        }
                        self._kept.add(row)
                        yield i, row

    def _asked(self, request: Instance, repeats: Counter[str]) -> _Asked:
        """A request as prompt and options. Each has a seed of its own, which does not depend on the other requests."""
        text, settings = request.args
        given, most = self._options(dict(settings))
        whole = self.tok_encode(text)
        if most >= self.max_length:
            raise UserError(
                f"task {request.task_name} asks for {most} tokens, which leaves no room for a prompt in "
                f"{self.max_length}: set a smaller max_gen_toks in its generation_kwargs"
            )
        ids, room = maybe_truncate(whole, most, self.max_length, side="left", verbose=True)
        name = hash_of([text, settings])
        seed = following_seed(self._seed, int(name[:8], 16) + repeats[name])
        repeats[name] += 1
        options = GenerationOptions.of(
            None, {**given, **self._decoding, "seed": seed, "max_new_tokens": room}
        )
        key = hash_of([self._made_by, self._method.name, ids, options.to_dict()])
        return _Asked(key, ids, len(whole) - len(ids), options)

    def _options(self, given: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Stop strings and sampling as our options, and the maximum number of tokens."""
        known: dict[str, Any] = dict(normalize_gen_kwargs(given, self._most))
        until = handle_stop_sequences(known.pop("until"), self.tokenizer.decode([self.eot_token_id]))
        sampled, most = known.pop("do_sample"), known.pop("max_gen_toks")
        options = {name: known.pop(name) for name in _SAMPLING if known.get(name) is not None}
        known = {name: value for name, value in known.items() if value is not None}
        if known.pop("num_beams", 1) != 1:
            known["num_beams"] = "more than one"
        if known:
            raise UserError(
                f"generation_kwargs of the task: {next(iter(known))} is not honoured; known are until, max_gen_toks, "
                f"do_sample, {', '.join(_SAMPLING)}"
            )
        if not sampled:
            options = {"temperature": 0.0, **{n: v for n, v in options.items() if n == "repetition_penalty"}}
        return {**options, "stop": [one for one in until if one]}, most

    def get_model_info(self) -> dict[str, Any]:
        """What the results JSON says of the model: the pair, the method, and what its answers cost, by task too."""
        models = self.pair.models
        tasks = dict.fromkeys(one["task"] for one in self._answers)
        return {
            "target": models.target.id,
            "draft": None if models.draft is None else models.draft.id,
            "model_num_parameters": models.target.size,
            "model_dtype": models.target.weights,
            "method": self._method.name,
            "lossless": self._method.lossless(),
            "seed": self._seed,
            **_costs(self._answers),
            "tasks": {name: _costs([one for one in self._answers if one["task"] == name]) for name in tasks},
        }


def _counts(text: Generation) -> dict[str, float]:
    """What an answer cost."""
    stats = text.stats
    return {
        "new_tokens": stats.new_tokens,
        "target_calls": stats.target_calls,
        "drafted": stats.drafted,
        "drift": stats.drift_sum or 0,
        "scored": stats.drift_coverage * stats.new_tokens,
        "at_limit": text.finish_reason == "length",
    }


def _costs(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of answers and their ratios, with 95 % intervals over questions."""
    if not answers:
        return {}
    questions: dict[Any, Counter[str]] = defaultdict(Counter)
    for one in answers:
        questions[one["task"], one["question"]].update(
            {n: v for n, v in one.items() if n not in ("task", "question")}
        )
    sums = {name: [one[name] for one in questions.values()] for name in ("new_tokens", "scored", "drift",
            "target_calls", "drafted", "at_limit", "cut_prompts", "known")}  # fmt: skip
    whole = {name: sum(values) for name, values in sums.items()}
    found: dict[str, Any] = {
        "answers": len(answers), "questions": len(questions), "new_tokens": whole["new_tokens"],
        "answers_at_limit": whole["at_limit"], "cut_prompts": whole["cut_prompts"], "known_answers": whole["known"],
    }  # fmt: skip
    intervals = {}
    for name, top, bottom in (
        ("mean_drift", "drift", "scored"), ("drift_coverage", "scored", "new_tokens"),
        ("target_calls_per_token", "target_calls", "new_tokens"), ("drafted_per_token", "drafted", "new_tokens"),
    ):  # fmt: skip
        found[name] = None
        if whole[bottom]:
            found[name], *intervals[name] = ratio_of_sums(sums[top], sums[bottom])
    return {**found, "intervals": intervals}


def register() -> None:
    """Make ``--model sprinter`` known to the harness in this process, for releases that read no entry points."""
    import lm_eval.models  # its own models come first

    assert lm_eval.models.MODEL_MAPPING
    if "sprinter" not in model_registry:
        model_registry.register("sprinter", target="sprinter.doors.lm_eval:SprinterLM")


def find_tasks(
    tasks: Sequence[str], data: Path | None = None, include_path: Path | None = None, run_code: bool = False
) -> TaskManager:
    """The harness's manager of tasks, with these read once, so that one that cannot be run is refused early.

    Args:
        tasks: names of the harness; with ``data``, of ``TASKS``.
        data: directory with the files of ``TASKS``; None: the harness's own tasks, from the hub.
        include_path: directory with further tasks.
        run_code: whether tasks may run the programs that the model writes.

    Raises:
        UserError: no task, an unknown one, one that runs programs, or a file that is missing.
    """
    if data is not None:
        os.environ["SPRINTER_DATA"] = str(data)
    folders = [str(folder) for folder in (data and TASKS, include_path) if folder]
    manager = TaskManager(include_path=folders or None, include_defaults=data is None)
    known = manager.all_tasks
    if not tasks:
        raise UserError("no task was named: give one, such as gsm8k")
    if missing := [name for name in tasks if name not in known]:
        near = get_close_matches(missing[0], known, 3) or (known[:9] if data else ["see 'lm_eval ls tasks'"])
        raise UserError(f"there is no task {missing[0]!r}: did you mean {', '.join(near)}?")
    for name, task in manager.load(list(tasks))["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not run_code:
            raise UserError(f"task {name} runs the programs that the model writes: allow it with --run-code")
    return manager


def evaluate(
    pair: Pair,
    tasks: Sequence[str],
    methods: Sequence[str | None] = (None,),
    *,
    manager: TaskManager,
    rows: int = 8,
    decoding: Mapping[str, Any] | None = None,
    kept: Memory | None = None,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Run the harness's tasks once for each method.

    Args:
        tasks: names of tasks. manager: of ``find_tasks``.
        methods: as in ``GenerationOptions``. Log-likelihoods are computed once for all.
        rows: that share passes.
        decoding: ``budget``, ``seed`` and the like, of all methods.
        kept: as in ``SprinterLM``.
        settings: of ``lm_eval.simple_evaluate``, such as ``limit``, ``num_fewshot``, ``apply_chat_template``.

    Returns:
        The harness's results JSON of each method as it is finished. ``["config"]`` has its drift and calls,
        ``["seconds"]`` its time in this process.

    Raises:
        UserError: a method that the pair cannot run.
    """
    from lm_eval import simple_evaluate

    kept = Memory(lambda row: str(row["key"])) if kept is None else kept
    models = [
        SprinterLM(pair=pair, method=one, batch_size=rows, kept=kept, **(decoding or {})) for one in methods
    ]

    def results(model: SprinterLM) -> dict[str, Any]:
        began = time.perf_counter()
        found = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            log_samples=False,
            batch_size=rows,
            **settings,
        )
        return {**found, "seconds": time.perf_counter() - began}

    return map(results, models)
