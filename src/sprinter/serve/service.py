"""The loaded pair and its engine: what the routes of a server ask."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from sprinter.engine.async_engine import AsyncEngine, EngineStream
from sprinter.engine.pair import Pair
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import EncodedPrompt, PromptInput, encode_prompt
from sprinter.engine.tokens import text_ids
from sprinter.errors import NoMemoryError, UserError
from sprinter.fingerprint import weights_fingerprint, words_fingerprint
from sprinter.models.memory import free_bytes
from sprinter.random import following_seed
from sprinter.serve.api_errors import Refusal, too_long
from sprinter.serve.conversations import readable_messages, template_arguments
from sprinter.serve.fill_in import fill_in, fill_in_marks
from sprinter.serve.message_parsing import TextParts, parts_of
from sprinter.serve.owners import Owners
from sprinter.serve.prometheus import ServeState
from sprinter.serve.request_parsing import TextRequest, check_laws
from sprinter.serve.schema import ScoreRequest, TokenizeRequest
from sprinter.serve.settings import ServeSettings

__all__ = ["Service", "shown_id"]

_REPORTED = 4
"""Log-probabilities that a reported token counts as."""
_log = logging.getLogger("sprinter.serve")


class Service:
    """A pair of a server and its engine, from before they are loaded to the end.

    Args:
        settings: of the server.
        load: loads the pair; called in another thread than the event loop's.
        name: of the model. None: the settings', or the target's.
        owners: of requests; None: there is no other pair.

    Attributes:
        error: why there is no engine, or why it has stopped.
        on_failure: called in any thread when ``error`` is set.
        loaded: done when the pair is loaded, or cannot be.
        methods: that it can run, as the page knows them; None: nobody has asked.
    """

    def __init__(
        self,
        settings: ServeSettings,
        load: Callable[[], Pair],
        name: str | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.settings, self._load, self._name = settings, load, name or settings.model_name
        self.owners = Owners(settings, lambda: [self.now_served()]) if owners is None else owners
        self.turns, self.metrics = self.owners.turns, self.owners.metrics
        self.loaded: Future[None] = Future()
        self.methods: list[dict[str, Any]] | None = None
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.created = int(time.time())
        self._pair: Pair | None = None
        self._engine: AsyncEngine | None = None
        self._closed = False
        self._weights: str | None = None
        self._encoding = Lock()  # tokenizers may keep settings between calls

    # --- life ---
    def begin(self) -> None:
        """Load the pair in a thread, which a process that ends meanwhile does not wait for."""
        Thread(target=self._load_all, name="sprinter-load", daemon=True).start()

    def _load_all(self) -> None:
        """Load the pair and start the engine; a failure is kept in ``error``."""
        try:
            pair, own = self._load(), self.settings
            if own.method is not None or own.budget is not None:
                pair.stream(
                    [0], method=own.method, budget=own.budget, require_lossless=own.require_lossless
                ).close()
            if own.never_slower:  # before the first request, and while nothing else runs
                costs = pair._runtime.shared_costs if own.rows > 1 else pair.pass_costs
                _log.info("costs of forward passes", extra={"fields": asdict(costs)})
            self._pair = pair
            few = pair.models.target.model.device.type == "cpu"
            most = own.step_tokens or (2048 if not few else 24 if own.has_owners else 64)
            policy = Policy(
                first=True, prompt_piece=min(128, most), prompt_tokens=most,
                target_tokens=4 * own.rows if few and own.has_owners else None,
                draft_steps=2 if few and own.has_owners else None,
            )  # fmt: skip
            self._engine = AsyncEngine(
                pair, own.rows, policy, own.max_len, own.memory_bytes, max_waiting=own.max_waiting,
                shared_queue=own.has_owners, on_death=self._fail, shared_prefixes=own.share_prefixes,
                shared_rows=own.has_owners if self.owners.keys is None else self.owners.keys.owners - 1,
            )  # fmt: skip
            if self._closed:
                self._engine.close()
                return
            _log.info("ready", extra={"fields": {"model": self.model, "engine": repr(self._engine)}})
        except BaseException as error:
            self._fail(error)
        finally:
            self.loaded.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.on_failure()

    async def aclose(self) -> None:
        """Cancel what is open, and release the caches."""
        self._closed = True
        if self._engine is not None:
            await self._engine.aclose()

    @property
    def state(self) -> str:
        """ "loading", "ready", "closing" or "failed"."""
        if self.error is not None:
            return "failed"
        if self._engine is None:
            return "loading"
        return "closing" if self._engine.closing else "ready"

    @property
    def engine(self) -> AsyncEngine:
        """The engine.

        Raises:
            Refusal: it is not loaded, or has failed.
        """
        if self._engine is None or self.error is not None:
            if self.error is not None:
                raise Refusal(503, "the model has failed", "engine_failed")
            raise Refusal(503, "the model is being loaded", "loading", retry_after_s=5)
        return self._engine

    @property
    def pair(self) -> Pair:
        """The pair; errors as ``engine``."""
        assert self.engine is not None and self._pair is not None
        return self._pair

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The pair's tokenizer; errors as ``engine``, and a UserError if it has none."""
        if self.pair.tokenizer is None:
            raise UserError("this pair has no tokenizer: give token ids")
        return self.pair.tokenizer

    def now_served(self) -> ServeState:
        """For the metrics."""
        waiting = 0 if self._engine is None else self._engine.waiting
        running = 0 if self._engine is None else self._engine.unfinished - waiting
        held = 0.0 if self._engine is None else self._engine.held
        return ServeState(self.model, running, waiting, self.settings.rows, self.state == "ready", held)

    # --- questions ---
    @property
    def model(self) -> str:
        """Name of the model; "loading" before it is known."""
        if self._name is not None:
            return self._name
        return "loading" if self._pair is None else shown_id(self._pair.models.target.id)

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it, by its name or by another one of it."""
        pair = self.pair
        return {
            "id": name or self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "sprinter",
            "max_model_len": self.engine.max_len,
            "sprinter": {
                "target": shown_id(pair.models.target.id),
                "draft": pair.models.draft and shown_id(pair.models.draft.id),
                "adapter": pair.models.target.adapter and Path(pair.models.target.adapter).name,
                "heads": sorted([*pair.heads, *([pair.drafting.kind] if pair.drafting else [])]),
                "default_method": self.settings.method or pair.default_method,
                "require_lossless": self.settings.require_lossless,
            },
        }

    def encode(self, prompt: PromptInput, asked: TextRequest | None = None) -> EncodedPrompt:
        """Token ids of a prompt; not in the event loop, as it may be long.

        Args:
            asked: the request that it belongs to.

        Raises:
            UserError: what is wrong with it. Refusal: it is longer than the server allows.
        """
        most, kwargs = self.settings.max_prompt_tokens or self.engine.max_len, None
        chat = not isinstance(prompt, str) and any(isinstance(one, Mapping) for one in cast(Any, prompt))
        if chat and (count := len(cast(Any, prompt))) > most:  # a template writes a token for each at least
            raise too_long(most, f"there are {count} messages", "messages")
        with self._encoding:
            if chat:
                prompt = readable_messages(cast(Any, prompt), self.tokenizer)
                if asked is not None:
                    kwargs = template_arguments(
                        self.tokenizer, asked.template_kwargs, asked.tools, asked.effort
                    )
            if asked is not None and asked.suffix is not None:
                prompt = fill_in(cast(Any, prompt), asked.suffix, self.pair.models)
            encoded = encode_prompt(prompt, self.pair.models, kwargs, longest=most)
        if len(encoded.ids) > most:
            raise too_long(most, f"the prompt has {len(encoded.ids)}", "messages" if chat else "prompt")
        return encoded

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())

    def scored_model(self) -> dict[str, Any]:
        """What a client must know of the target to decode with it from another machine."""
        models, target = self.pair.models, self.pair.models.target
        return {
            "model": self.model,
            "fingerprint": self._fingerprint(),
            "vocabulary": words_fingerprint(self.tokenizer.get_vocab()),
            "vocab_size": models.vocab_size,
            "context": min(self.engine.max_len, target.context),
            "eos_ids": list(target.eos_ids),
            "parameters": target.size,
            "weights": target.weights,
        }

    def _fingerprint(self) -> str:
        if self._weights is None:
            self._weights = weights_fingerprint(self.pair.models.target.model)
        return self._weights

    async def laws(
        self, asked: ScoreRequest, owner: str, after: list[Callable[[], None]]
    ) -> list[memoryview]:
        """The laws of each text, one after the other; the tokens that are read for them are charged for.

        Args:
            after: called when the answer has been read.

        Raises:
            Refusal: another model than the client began with; more laws than an answer, or all of them, may hold.
        """
        # reads all weights once
        known = self._weights or str(await self.turns.run(owner, self._fingerprint))
        after.append(self.owners.hold_laws(owner, check_laws(asked, known, self.pair.models.vocab_size)))
        self.owners.charge_tokens(
            owner, sum(self.engine.unread(one.ids, one.start, owner) for one in asked.texts)
        )
        found = [await self.engine.laws(one.ids, one.start, owner=owner) for one in asked.texts]
        dtype = getattr(torch, asked.dtype)
        made = await self.turns.run(owner, lambda: [law.to(dtype).view(torch.uint8).numpy() for law in found])
        return [one.data.cast("B") for one in made]

    def tokenized(self, asked: TokenizeRequest, owner: str) -> list[int]:
        """Token ids of messages, or of a text, which may be empty; they are charged for."""
        models, tokenizer = self.pair.models, self.tokenizer
        if asked.messages is not None:
            ids = self.encode(asked.messages).ids
        else:
            with self._encoding:
                ids = text_ids(asked.prompt or "", models, tokenizer, special=asked.add_special_tokens)
        self.owners.charge_tokens(owner, len(ids))
        return ids

    def text_of(self, ids: Sequence[int], owner: str) -> str:
        """The text of token ids, which are charged for; special tokens written out."""
        self.owners.charge_tokens(owner, len(ids))
        tokenizer, size = self.tokenizer, self.pair.models.vocab_size
        if outside := [id for id in ids if id >= size]:
            raise UserError(f"token id {outside[0]} is out of range: the vocabulary has {size} tokens")
        with self._encoding:
            return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    # --- limits ---
    def retry_after_s(self) -> int:
        """When to try again if there is no room, by what waits now and the pace of the last texts; seconds."""
        return max(1, math.ceil(0 if self._engine is None else self._engine.wait_s))

    def _check_size(self, asked: TextRequest, prompts: Sequence[EncodedPrompt]) -> None:
        """Refuse texts that do not fit into a row, and an answer that would be too large to be built.

        Raises:
            Refusal: a text is too long, or the answer would have too many log-probabilities or reported tokens.
        """
        longest, room = max(len(prompt.ids) for prompt in prompts), self.engine.max_len
        new = asked.options.max_new_tokens if asked.generates else 0
        least = 1 if new is None or (new and not self.settings.refuse_long) else new
        if longest + least > room:
            what = f"the prompt has {longest} and max_tokens is {least if new is None else new}"
            raise too_long(room, what, "messages" if asked.chat else "max_tokens")
        most = self.settings.max_logprobs
        each = (0 if asked.logprobs is None else asked.logprobs + 1) + _REPORTED * asked.tokens
        echoed = asked.echo * asked.n * sum(len(prompt.ids) for prompt in prompts)
        tokens = self.new_tokens(asked, prompts) + echoed
        if max(each * tokens, echoed) > most:
            raise Refusal(
                400,
                f"the answer may have {tokens} tokens, each with {each} log-probabilities (a token that is reported "
                f"counts as {_REPORTED}), and here are at most {most}: ask for fewer texts, tokens or logprobs",
                param="logprobs" if asked.logprobs else "max_tokens",
            )  # fmt: skip

    def new_tokens(self, asked: TextRequest, prompts: Sequence[EncodedPrompt]) -> int:
        """Number of tokens that the texts of a request may have, all together."""
        if not asked.generates:
            return 0
        return asked.n * sum(self._room(asked, prompt) for prompt in prompts)

    def _room(self, asked: TextRequest, prompt: EncodedPrompt) -> int:
        """Number of tokens that a text after a prompt may have: as many as are asked for, or fit into the row."""
        new, room = asked.options.max_new_tokens, self.engine.max_len - len(prompt.ids)
        return room if new is None else min(new, room)

    def submit(
        self, asked: TextRequest, owner: str, gone: Event
    ) -> tuple[list[EncodedPrompt], list[EngineStream], list[TextParts]]:
        """Encode the prompts, compile what confines the texts, and submit all or none; not in the event loop.

        Args:
            gone: set when nobody waits for the texts any more.

        Returns:
            The prompts, and the streams of the texts and what reads them: those of the first prompt first.

        Raises:
            UserError, EngineError, Refusal: why they are not taken; nobody waits for them.
        """
        engine, most = self.engine, self.settings.most_texts
        if asked.count > most:
            message = f"{asked.count} texts in one request: this server takes at most {most} at a time"
            raise Refusal(400, message, param="n")
        if asked.generates:
            engine.check_room(owner, asked.count)
        free = free_bytes(self.pair.models.target.model.device)
        if free is not None and free < self.settings.min_free_bytes:
            raise NoMemoryError("there is not enough free memory for another request now: try again later")
        prompts = [self.encode(prompt, asked) for prompt in asked.prompts]
        self._check_size(asked, prompts)
        parts = [self._parts(asked, prompt) for prompt in prompts for _ in range(asked.n)]
        _held = self.pair._runtime.grammars.prepare(asked.options)
        if gone.is_set():
            raise Refusal(499, "the client has left")
        read, new = sum(len(prompt.ids) for prompt in prompts), self.new_tokens(asked, prompts)
        self.owners.charge_tokens(owner, read + new)
        streams: list[EngineStream] = []
        if asked.generates:
            try:
                stops = () if asked.suffix is None else fill_in_marks(self.tokenizer)
                for prompt in prompts:
                    for i in range(asked.n):
                        options = asked.options.replace(
                            seed=following_seed(asked.options.seed, i),
                            max_new_tokens=None if asked.options.max_new_tokens is None else self._room(asked, prompt),
                            stop_token_ids=(*asked.options.stop_token_ids, *stops),
                        )  # fmt: skip
                        streams.append(engine.stream(prompt, options, owner=owner))
            except BaseException:
                self.owners.give_back_tokens(owner, read + new)
                for stream in streams:
                    stream.cancel()
                raise
        return prompts, streams, parts

    def _parts(self, asked: TextRequest, prompt: EncodedPrompt) -> TextParts:
        """What reads a text after a prompt as it is answered."""
        ends = (*self.pair.models.target.eos_ids, *prompt.ends, *asked.options.stop_token_ids)
        return parts_of(
            self.pair.tokenizer,
            prompt,
            ends,
            tools=asked.tools,
            several=asked.several_calls,
            special=asked.special,
            forced=asked.forced,
        )


def shown_id(id: str) -> str:
    """A hub id as it is, a directory or file by its name: clients need not know where it is."""
    path = Path(id).expanduser()
    return path.name if path.exists() else id
