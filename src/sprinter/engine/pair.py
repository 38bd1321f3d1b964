"""The public pair: load two models and a gate, generate and stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.engine.engine import generate_all, of_prompt
from sprinter.engine.generation import Generation, Request
from sprinter.engine.policy import Policy
from sprinter.engine.stream import Stream
from sprinter.engine.task import Parts, Task
from sprinter.errors import UserError
from sprinter.heads.artifact import load_head
from sprinter.heads.gate import load_gate
from sprinter.heads.head import Head
from sprinter.models.bars import bars_on_terminals
from sprinter.models.gguf.convert import for_runner
from sprinter.models.pair import LoadedPair, builtin_heads, builtin_paths, load_models

__all__ = ["Pair", "Stream", "load_pair"]

MeterMode = Literal["running", "complete"]


@bars_on_terminals()
def load_pair(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | None = None,
    *,
    gate: str | Path | Head | None = None,
    heads: Sequence[str | Path | Head] = (),
    runner: str = "auto",
    **options: Any,
) -> Pair:
    """Load a pair from directories or hub ids; without arguments the built-in pair and its gate, no network needed.

    Args:
        target: directory, hub id, GGUF file (also on the hub: org/name/file.gguf) or loaded model. None: the built-in
            pair.
        draft: likewise; may be left out for plain decoding.
        gate: gate directory or hub id, made for this draft.
        heads: directories or hub ids of other heads made for this draft: those that "specdec++" and "disco" read.
        runner: "auto" (llama.cpp runs GGUF files, PyTorch the rest), "torch" (GGUF files are refused) or "llamacpp"
            (other models are converted once and kept in the cache; dtype "float32", "float16" or "q8_0").
        options: device, dtype, device_map, attn_implementation, quantization_config, tokenizer, revision,
            draft_revision, trust_remote_code, compile; see ``load_models``.

    Raises:
        UserError: a directory that is missing or wrong, vocabularies that differ, a gate made for another draft, ...
    """
    if target is None:
        if draft is not None:
            raise UserError("a draft was given without a target: give target=... too")
        paths = builtin_paths()
        target, draft, gate = paths["target"], paths["draft"], gate or paths["gate"]
        heads = heads or builtin_heads()
    if isinstance(heads, str | Path | Head):
        raise UserError(f"heads={heads!r} is one head: give a list, heads=[...]")
    target, draft, options = for_runner(runner, target, draft, options)
    models = load_models(target, draft, **options)
    loaded = load_gate(gate) if isinstance(gate, str | Path) else gate
    others = [load_head(head) if isinstance(head, str | Path) else head for head in heads]
    return Pair(models, loaded, others)


class Pair:
    """Two models, a tokenizer and perhaps a gate, ready to generate. Made by ``load_pair``.

    Raises:
        UserError: a head that was made for another draft, two heads of one kind, a gate that looks at x.
    """

    def __init__(self, models: LoadedPair, gate: Head | None = None, heads: Sequence[Head] = ()) -> None:
        self.models, self.tokenizer = models, models.tokenizer
        self.heads: dict[str, Head] = {}
        for head in heads if gate is None else (gate, *heads):
            self._add(head)
        self.gate = self.heads.get("gate")
        self._parts = Parts(models, self.heads)

    def __repr__(self) -> str:
        target, draft = self.models.target, self.models.draft
        heads = ", ".join(self.heads) or None
        where = f"{target.weights} on {target.model.device}"
        return f"Pair(target={target.id!r}, draft={draft and draft.id!r}, heads={heads}, {where})"

    def _add(self, head: Head) -> None:
        if not isinstance(head, Head):
            raise UserError(f"{head!r} is no head: give a directory, a hub id or a Head")
        kind, draft = head.config.kind, self.models.draft
        if draft is None:
            raise UserError(
                f"a head ({kind}) reads the draft's hidden states, and this pair has no draft: give draft=..."
            )
        if kind in self.heads:
            raise UserError(f"two heads of kind '{kind}' were given: a pair has one of each")
        if kind in ("gate", "disco") and head.sees_token:  # the meter counts on it
            raise UserError(
                f"this {kind} head reads {', '.join(head.features)} and so looks at the token that it judges: "
                "train it on features of the prefix (hidden, entropy, max_q, top_q, position, temperature)"
            )
        head.check_draft(
            id=draft.id, revision=draft.revision, hidden_size=draft.hidden_size, model=draft.model
        )
        self.heads[kind] = head.to(draft.model.device)

    @property
    def default_method(self) -> str:
        """What decodes where no method is named, exactly: ``speculative`` with a draft, else ``autoregressive``."""
        return "speculative" if self.models.draft else "autoregressive"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method | None = None,
        max_new_tokens: int | None = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: int | Sequence[int] | None = (),
        meter: MeterMode = "running",
        ahead: int | Literal["auto"] = 1,
        rules: RuleState | Mapping[str, Any] | None = None,
    ) -> Generation:
        """Generate one text.

        Args:
            prompt: text, or token ids.
            method: a spec such as "sprinter(tau=0.6)" or a Method; None decodes exactly, by ``default_method``.
            max_new_tokens: exact limit; None: to the end of the models' context.
            temperature, top_k, top_p, min_p: sampling, for both models alike; temperature 0 is greedy.
            seed: the same seed gives the same text.
            stop: strings that end the text, also those of special tokens ("<|im_end|>"); cut off with all that follows.
            stop_token_ids: tokens that end the text beside EOS. Like EOS they are among the tokens, and have no text.
            meter: "complete" adds closing passes so that every trusted token is scored.
            ahead: draft tokens an answer of the driver; the text does not depend on it. "auto": as many as pays, by
                what a look and a step cost and how long runs are.
            rules: the ``rules`` of an earlier generation by the same method, so that AdaEDL's λ or the heuristic's γ
                are carried over; or what its record tells of them (``to_dict``); None begins anew.

        Raises:
            UserError: what is wrong with the request and how to mend it.
        """
        with self.stream(
            prompt, method=method, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, seed=seed, stop=stop, stop_token_ids=stop_token_ids, meter=meter, ahead=ahead, rules=rules,
        ) as stream:  # fmt: skip
            return stream.finish()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method | None = None,
        max_new_tokens: int | None = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: int | Sequence[int] | None = (),
        meter: MeterMode = "running",
        ahead: int | Literal["auto"] = 1,
        rules: RuleState | Mapping[str, Any] | None = None,
    ) -> Stream:
        """Like ``generate``, token by token; the request is checked at once, before the first token is asked for."""
        request = Request.make(
            self.default_method if method is None else method, max_new_tokens, temperature, top_k, top_p, min_p, seed,
            stop, meter, ahead, rules, stop_token_ids,
        )  # fmt: skip
        return Stream(Task(self._parts, prompt, request))

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        method: str | Method | Sequence[str | Method | None] | None = None,
        max_new_tokens: int | Sequence[int | None] | None = 64,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] | Sequence[Sequence[str]] | None = (),
        stop_token_ids: int | Sequence[int] | Sequence[Sequence[int]] | None = (),
        meter: MeterMode | Sequence[MeterMode] = "running",
        ahead: int | Literal["auto"] | Sequence[int | Literal["auto"]] = 1,
        rules: RuleState | Mapping[str, Any] | Sequence[RuleState | Mapping[str, Any] | None] | None = None,
        rows: int | None = None,
        policy: Policy = Policy(),
        memory_bytes: int | None = None,
    ) -> list[Generation]:
        """Generate many texts at once, in the order of the prompts.

        Each text is what ``generate`` would give with the same settings, whatever its neighbours; ``Engine`` says what
        the times in the stats mean. Settings as of ``generate``: one value for all, or a list with one a prompt.

        Args:
            stop, stop_token_ids: what ends a text, for all; or a list of such lists, one a prompt.
            max_new_tokens: exact limit; None: to the end of the models' context, which all rows then hold.
            rows: texts that are under way at the same time; None: all, up to 32.
            policy: when the target's pass is run.
            memory_bytes: what the caches may take; None: nine tenths of the free memory.

        Raises:
            UserError: what is wrong with a request and how to mend it, begun with "prompt 3: " for the one at index 3;
                rows that do not fit into memory.
        """
        if isinstance(prompts, str | bytes):
            raise UserError("prompts is one text: give a list of prompts")
        if not isinstance(prompts, Iterable):
            raise UserError(f"prompts={prompts!r} is no list of prompts: give one")
        prompts = list(prompts)
        count = len(prompts)
        columns = [
            _spread("method", method, count), _spread("max_new_tokens", max_new_tokens, count),
            _spread("temperature", temperature, count), _spread("top_k", top_k, count),
            _spread("top_p", top_p, count), _spread("min_p", min_p, count), _spread("seed", seed, count),
            _spread_lists("stop", stop, count), _spread("meter", meter, count), _spread("ahead", ahead, count),
            _spread("rules", rules, count), _spread_lists("stop_token_ids", stop_token_ids, count),
        ]  # fmt: skip
        alike = all(value is column[0] for column in columns for value in column)
        requests = []
        for i, (which, *rest) in enumerate(zip(*columns, strict=True)):
            with nullcontext() if alike else of_prompt(i):  # what is wrong with all is no one prompt's
                requests.append(Request.make(self.default_method if which is None else which, *rest))
        return generate_all(self, prompts, requests, rows, policy, memory_bytes)


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value a prompt."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise UserError(
            f"{name} has {len(value)} values for {count} prompts: give one for all, or one a prompt"
        )
    return list(value)


def _spread_lists(name: str, value: Any, count: int) -> list[Any]:
    """One list a prompt, where a flat list is one for all."""
    if isinstance(value, list | tuple) and any(isinstance(each, list | tuple | None) for each in value):
        return _spread(name, value, count)
    return [value] * count
