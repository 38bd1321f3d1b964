"""Sprinter inside lm-evaluation-harness: ``--model sprinter``, and what ``sprinter eval`` runs.

Log-likelihoods are those of the target alone; ``generate_until`` decodes by the method. The results JSON has, under
"config", the method with its drift, coverage and target calls a token over all answers.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

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
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm

from sprinter.decode.draft import Stats
from sprinter.engine.pair import Pair, load_pair
from sprinter.engine.scoring import ScoredText, finished, score_texts
from sprinter.errors import UserError
from sprinter.models.choose import make_runner, runner_kind

__all__ = ["TASKS", "SprinterLM", "evaluate", "register"]

TASKS = Path(__file__).with_name("tasks")
"""Tasks over files, for use without a network: gsm8k, commonsenseqa, mmlu, mmlu_written, humaneval."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


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
            "seed": seed,
        }
        self._method = self.pair.method_for(method=method, budget=budget, require_lossless=require_lossless)
        self._rows, self._most = max(1, int(batch_size)), max_gen_toks
        own = self.pair.models.context
        self.max_length = own if max_length is None else min(own, max_length)
        self._totals: dict[str, float] = defaultdict(float)

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
        continued."""
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
        results: list[tuple[float, bool]] = []
        for (strings, _, continuation), scored in zip(
            requests, self._scored(texts, disable_tqdm), strict=True
        ):
            answer = float(scored.logprobs.sum()), scored.top_ids[:, 0].tolist() == continuation
            self.cache_hook.add_partial("loglikelihood", strings, answer)
            results.append(answer)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, in windows of the longest context, each token predicted once."""
        sums: list[float] = []
        for (string,) in (one.args for one in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(string, add_special_tokens=False), self.prefix_token_id, self.max_length, 1
            )
            given = [(("", ""), *make_disjoint_window(one)) for one in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(given, True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), sums[-1])
        return sums

    def _scored(self, texts: Sequence[tuple[list[int], list[int]]], quiet: bool) -> list[ScoredText]:
        """Log-probabilities of continuations, in the given order; texts of like length share passes."""
        models = self.pair.models
        rows = 1 if runner_kind(models.target.model)[0] == "crop" else self._rows
        order = sorted(range(len(texts)), key=lambda i: (len(texts[i][0]) + len(texts[i][1]), texts[i][0]))
        results: dict[int, ScoredText] = {}
        with tqdm(total=len(texts), desc="log-likelihoods", disable=quiet) as bar:
            for at in range(0, len(order), rows):
                part = [texts[i] for i in order[at : at + rows]]
                longest = max(len(context) + len(new) for context, new in part)
                runner = make_runner(models.target.model, batch=len(part), max_len=longest)
                scored = finished(score_texts(runner, part, models.vocab_size, top=1))
                results.update(zip(order[at : at + rows], scored, strict=True))
                bar.update(len(part))
        return [results[i] for i in range(len(texts))]

    # --- answers, by the method ---------------------------------------------------------------------------------------
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers by the method, each up to a stop string; requests with the same settings share passes."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, one in enumerate(requests):
            groups[repr(one.args[1])].append(i)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc=f"answers by {self._method.name}", disable=disable_tqdm) as bar:
            for group in groups.values():
                options, until, most = self._options(dict(requests[group[0]].args[1]))
                group.sort(key=lambda i: -len(requests[i].args[0]))
                for at in range(0, len(group), 4 * self._rows):
                    part = group[at : at + 4 * self._rows]
                    prompts, lengths = zip(
                        *(self._prompt(requests[i].args[0], most) for i in part), strict=True
                    )
                    texts = self.pair.generate_batch(
                        list(prompts), rows=min(self._rows, len(part)), max_new_tokens=list(lengths),
                        stop=until, **options, **self._decoding,
                    )  # fmt: skip
                    for i, text in zip(part, texts, strict=True):
                        answers[i] = postprocess_generated_text(text.text, until, None)
                        self._count(text.stats)
                        self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
                    bar.update(len(part))
        return answers

    def _prompt(self, text: str, most: int) -> tuple[list[int], int]:
        ids, room = maybe_truncate(self.tok_encode(text), most, self.max_length, side="left", verbose=True)
        return ids, room

    def _options(self, given: dict[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        known: dict[str, Any] = dict(normalize_gen_kwargs(given, self._most))
        until = handle_stop_sequences(known.pop("until"), self.tokenizer.decode([self.eot_token_id]))
        sampled, most = known.pop("do_sample"), known.pop("max_gen_toks")
        options = {name: known.pop(name) for name in _SAMPLING if known.get(name) is not None}
        if known := {name: value for name, value in known.items() if value is not None}:
            raise UserError(
                f"generation_kwargs of the task: {next(iter(known))} is not honoured; known are until, max_gen_toks, "
                f"do_sample, {', '.join(_SAMPLING)}"
            )
        if not sampled:
            options = {"temperature": 0.0, **{n: v for n, v in options.items() if n == "repetition_penalty"}}
        return options, [one for one in until if one], most

    def _count(self, stats: Stats) -> None:
        told = {
            "answers": 1, "new_tokens": stats.new_tokens, "target_calls": stats.target_calls, "drafted": stats.drafted,
            "drift": stats.drift_sum or 0, "scored": stats.drift_coverage * stats.new_tokens,
        }  # fmt: skip
        for name, value in told.items():
            self._totals[name] += value

    def get_model_info(self) -> dict[str, Any]:
        """What the results JSON says of the model: the pair, the method, and what its answers cost."""
        models, totals = self.pair.models, self._totals
        info: dict[str, Any] = {
            "target": models.target.id,
            "draft": None if models.draft is None else models.draft.id,
            "model_num_parameters": models.target.size,
            "model_dtype": models.target.weights,
            "method": self._method.name,
            "lossless": self._method.lossless(),
        }
        if tokens := totals["new_tokens"]:
            info |= {
                "answers": totals["answers"],
                "new_tokens": tokens,
                "mean_drift": totals["drift"] / totals["scored"] if totals["scored"] else None,
                "drift_coverage": totals["scored"] / tokens,
                "target_calls_per_token": totals["target_calls"] / tokens,
                "drafted_per_token": totals["drafted"] / tokens,
            }
        return info


def register() -> None:
    """Make ``--model sprinter`` known to the harness in this process."""
    import lm_eval.models  # its own models come first; 0.4.13 has no entry points

    assert lm_eval.models.MODEL_MAPPING
    if "sprinter" not in model_registry:
        model_registry.register("sprinter", target="sprinter.doors.lm_eval:SprinterLM")


def evaluate(
    pair: Pair,
    tasks: Sequence[str],
    methods: Sequence[str | None] = (None,),
    *,
    data: Path | None = None,
    include_path: Path | None = None,
    rows: int = 8,
    decoding: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run the harness's tasks once for each method.

    Args:
        tasks: names of the harness; with ``data``, of ``TASKS``.
        methods: as in ``GenerationOptions``. Tasks of log-likelihoods have the same result for all.
        data: directory with the files of ``TASKS``; None: the harness's own tasks, from the hub.
        include_path: directory with further tasks.
        rows: that share passes.
        decoding: ``budget``, ``seed`` and the like, of all methods.
        settings: of ``lm_eval.simple_evaluate``, such as ``limit``, ``num_fewshot``, ``apply_chat_template``.

    Returns:
        The harness's results JSON of each method. ``["config"]`` has its drift and calls, ``["seconds"]`` its time.

    Raises:
        UserError: an unknown task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if data is not None:
        os.environ["SPRINTER_DATA"] = str(data)
    folders = [str(folder) for folder in (data and TASKS, include_path) if folder]
    manager = TaskManager(include_path=folders or None, include_defaults=data is None)
    known = manager.all_tasks
    if missing := [name for name in tasks if name not in known]:
        near = get_close_matches(missing[0], known, 3) or (known[:9] if data else ["see 'lm_eval ls tasks'"])
        raise UserError(f"there is no task {missing[0]!r}: did you mean {', '.join(near)}?")
    models = [SprinterLM(pair=pair, method=one, batch_size=rows, **(decoding or {})) for one in methods]
    results = []
    for model in models:
        began = time.perf_counter()
        found = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            log_samples=False,
            batch_size=rows,
            **settings,
        )
        results.append({**found, "seconds": time.perf_counter() - began})
    return results
