"""A plain loop in the manner of gpt-fast, as an arm: what little code reaches without an engine.

One sequence. Weights that read the same input are one matrix, keys and values have a fixed place, and a step (pass and
draw) is one compiled graph on CUDA, where the next step is launched before the host has seen the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from sprinter.bench.arm import ArmAnswer, Ask
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling

LOOKS = 8  # steps between two looks of the host, which ends a text
KINDS = ("llama", "qwen2", "mistral")


class Decoder(nn.Module):
    """A model of ``KINDS`` over one sequence.

    Args:
        model: whose weights it takes. slots: most tokens of a text.
    """

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        super().__init__()
        config: Any = model.config
        if config.model_type not in KINDS or getattr(config, "sliding_window", None):
            raise UserError(
                f"the plain loop reads models of {', '.join(KINDS)}, and this is {config.model_type}"
            )
        inner: Any = model.model
        self.embed, self.layers, self.norm, self.rotary = (
            inner.embed_tokens,
            inner.layers,
            inner.norm,
            inner.rotary_emb,
        )
        self.head: Any = model.get_output_embeddings()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = inner.layers[0].self_attn.head_dim
        like = self.embed.weight
        self.keys, self.values = (
            like.new_zeros(len(inner.layers), 1, self.groups, slots, self.width) for _ in range(2)
        )
        self.places = torch.arange(slots, device=like.device)
        self.joined = [
            [_joined(one.self_attn.q_proj, one.self_attn.k_proj, one.self_attn.v_proj),
             _joined(one.mlp.gate_proj, one.mlp.up_proj)]
            for one in inner.layers
        ]  # fmt: skip

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits ``[V]`` after the last of ``tokens [1, n]`` at positions ``at [n]``."""
        x, n = self.embed(tokens), tokens.shape[1]
        cos, sin = self.rotary(x, at[None])
        seen = (self.places <= at[:, None])[None, None]
        for i, layer in enumerate(self.layers):
            (qkv, bias), (up, _) = self.joined[i]
            each = (
                functional.linear(layer.input_layernorm(x), qkv, bias)
                .view(1, n, -1, self.width)
                .transpose(1, 2)
            )
            q, k, v = each.split((self.heads, self.groups, self.groups), 1)
            self.keys[i].index_copy_(2, at, _turned(k, cos, sin))
            self.values[i].index_copy_(2, at, v)
            heard = functional.scaled_dot_product_attention(
                _turned(q, cos, sin), self.keys[i], self.values[i], seen, enable_gqa=True
            )
            x = x + layer.self_attn.o_proj(heard.transpose(1, 2).reshape(1, n, -1))
            gate, value = functional.linear(layer.post_attention_layernorm(x), up).chunk(2, -1)
            x = x + layer.mlp.down_proj(layer.mlp.act_fn(gate) * value)
        return self.head(self.norm(x[:, -1]))[0]


def _joined(*linears: Any) -> tuple[Tensor, Tensor | None]:
    biases = [one.bias for one in linears]
    weight = torch.cat([one.weight.detach() for one in linears])
    return weight, None if biases[0] is None else torch.cat([one.detach() for one in biases])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-other, one], -1) * sin[:, None]


class PlainLoop:
    """See ``sprinter.bench.arm.Arm``."""

    name = spec = "plain loop"
    engine = "loop"

    def __init__(self, slots: int = 1024) -> None:
        self._slots = slots
        self._decoder: Decoder | None = None
        self._ends: tuple[int, ...] = ()
        self._steps: dict[float, Callable[..., tuple[Tensor, Tensor]]] = {}

    def start(self, pair: Pair) -> None:
        """Copy the target's weights."""
        self._decoder = Decoder(pair.models.target.module(self.name), self._slots)
        self._ends, self._steps = pair.models.target.eos_ids, {}

    def lossless(self, sampling: Sampling) -> bool | None:
        """It draws from the target's law."""
        return True

    def versions(self) -> dict[str, str]:
        """Of torch."""
        return {"torch": str(torch.__version__)}

    @torch.inference_mode()
    def answer(self, ask: Ask) -> ArmAnswer:
        """One text; a step more than is seen may have run."""
        decoder, temperature = self._decoder, ask.sampling.temperature
        assert decoder is not None
        if ask.sampling != Sampling(temperature):
            raise UserError("the plain loop truncates no law: leave top_k, top_p and min_p out")
        if len(ask.ids) + ask.new_tokens > self._slots:
            raise UserError(f"the plain loop has {self._slots} slots: ask for a shorter text")
        device = decoder.places.device
        torch.manual_seed(ask.seed)
        began, ends = time.perf_counter(), {*self._ends, *ask.stop_token_ids}
        prompt = torch.tensor([ask.ids], device=device)
        token = _draw(decoder(prompt, decoder.places[: len(ask.ids)]), temperature)
        at, made, ids, arrivals = decoder.places[len(ask.ids)][None], [token], list[int](), list[float]()
        step = self._step(temperature)
        for count in range(1, ask.new_tokens + 1):
            if count % LOOKS == 0 or count == ask.new_tokens:
                ids += torch.cat(made).tolist()
                arrivals += [time.perf_counter() - began] * len(made)
                made = []
                if ends.intersection(ids):
                    break
            if count < ask.new_tokens:
                token, at = (one.clone() for one in step(token[None], at))
                made.append(token)
        n = next((i + 1 for i, one in enumerate(ids) if one in ends), len(ids))
        return ArmAnswer(ids[:n], arrivals[n - 1], arrivals[:n], [1] * n, n - 1, 0)

    def _step(self, temperature: float) -> Callable[..., tuple[Tensor, Tensor]]:
        decoder = self._decoder
        assert decoder is not None

        def step(token: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return _draw(decoder(token, at), temperature), at + 1

        if temperature not in self._steps:
            compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
            self._steps[temperature] = compiled if decoder.places.device.type == "cuda" else step
        return self._steps[temperature]

    def close(self) -> None:
        """Give the weights back."""
        self._decoder, self._steps = None, {}


def _draw(logits: Tensor, temperature: float) -> Tensor:
    """A token ``[1]``, by an exponential race."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    law = torch.softmax(logits.float() / temperature, -1)
    return (law / torch.empty_like(law).exponential_(1)).argmax(-1, keepdim=True)
