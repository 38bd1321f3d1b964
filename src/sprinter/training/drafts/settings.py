"""Settings of distilling a draft: the texts, the student, training; the command line reads them before torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from sprinter.errors import UserError
from sprinter.parameters import Positive, RealNumber, Sampling, WholeNumber, checked, like, stated
from sprinter.training.sources import ReadingSettings

__all__ = ["HeadSettings", "StudentSettings", "TextSettings", "TrainingSettings"]

Share = Annotated[RealNumber, Field(ge=0, le=1)]
Few = Annotated[WholeNumber, Field(ge=1, le=16)]


@checked
class TextSettings(ReadingSettings):
    """What the texts that a target writes depend on, besides target and data."""

    seed: WholeNumber = stated(0, "Seed of the texts: text i has seed + i.")
    temperature: RealNumber = like(
        Sampling.model_fields["temperature"],
        description="Temperature of the target's texts: that of later use. Its laws are stored raw (temperature 1).",
    )
    new_tokens: Positive = stated(256, "Maximum length of the target's answers.")
    prompt_tokens: Positive = stated(
        512, "Maximum prompt length. Running texts are truncated, examples beyond it are skipped."
    )
    prompt_share: Share = stated(0.3, "Share of a running text's words that is its prompt.")
    top: Positive = stated(
        64, "Most probable tokens that are stored of each law. The others are one further outcome."
    )
    rows: Positive = stated(
        32, "Texts that are written at the same time. On a GPU there are more, see ``training.drafts.waves``."
    )
    shard: Positive = stated(96, "Texts per shard, the unit of resuming.")
    held_out: Annotated[RealNumber, Field(ge=0, le=0.5)] = stated(
        0.05, "Share of the prompts that the draft is evaluated on. It is chosen by a hash of their tokens."
    )


@checked
class StudentSettings:
    """Shape of the student, a Llama model with the target's tokenizer."""

    layers: Positive = stated(2, "Decoder layers.")
    start: str | None = stated(
        None, "Directory, hub id or GGUF file of a smaller model whose embeddings and layers (llama, mistral, qwen2) "
        "the student starts from; one with another tokenizer is given the target's tokens. None: the target's.",
    )  # fmt: skip
    width: Positive | None = stated(
        None, "Hidden size; a smaller one projects the embeddings. None: that of the target, or of ``start``. A "
        "multiple of ``2 * heads``; the projection is a truncated singular value decomposition.",
    )  # fmt: skip
    heads: Positive | None = stated(None, "Attention heads. None: one per 64 hidden units, at least one.")
    feed_forward: Positive | None = stated(
        None,
        "Width of the feed-forward layers. None: 8/3 of the hidden size, rounded up to a multiple of 32.",
    )
    vocabulary: Positive | None = stated(
        None, "Tokens that the output layer knows; others are never drafted; only Sprinter loads such a draft. None: "
        "all. They are the most frequent ones of the target's texts.",
    )  # fmt: skip
    context: Positive | None = stated(None, "Maximum text length. None: the target's, at most 8192.")
    parallel: Few = stated(
        1, "Tokens that it drafts in one pass, with masks in place of all but the first (PARD); for "
        "``drafter=parallel``. 1: it drafts one token after the other.",
    )  # fmt: skip
    seed: WholeNumber = stated(0, "Seed of the initial weights.")

    def __post_init__(self) -> None:
        if self.width is not None and self.width % (2 * (self.heads or 1)):
            raise UserError(
                f"width={self.width} cannot be split into {self.heads or 1} heads of an even size: "
                f"give a multiple of {2 * (self.heads or 1)}"
            )


@checked
class HeadSettings:
    """Shape of heads on the target that draft."""

    kind: Literal["medusa", "eagle", "eagle3", "glide", "peagle", "dflash"] = stated(
        "medusa",
        "What is trained; 'eagle' is the head of EAGLE and EAGLE-2; 'peagle' and 'dflash' draft all tokens in one "
        "pass, dflash by a block-diffusion model.",
    )
    heads: Few | None = stated(
        None, "Medusa's heads, tokens of a pass of peagle and dflash: tokens ahead that are drafted. The others: steps "
        "of training. None: 4; eagle: 1. These are steps ahead of what the target has read.",
    )  # fmt: skip
    blocks: Few | None = stated(
        None, "Residual blocks of each of Medusa's heads; decoder layers of eagle3, peagle and dflash. P-EAGLE's paper "
        "has 4. None: 1; dflash: 2.",
    )  # fmt: skip
    share_output: bool = stated(
        False, "All of Medusa's heads end in the target's output layer: far fewer parameters. Else each ends in one of "
        "its own, which begins as a copy.",
    )  # fmt: skip
    discount: Share = stated(
        0.8, "Weight of each further head's loss, relative to the last. Both papers: 0.8."
    )
    regression: Annotated[RealNumber, Field(ge=0, le=1e6)] = stated(
        10.0, "Weight of EAGLE's loss of states, relative to that of laws. The paper: 10."
    )
    vocabulary: Positive | None = stated(
        None, "Tokens that EAGLE-3 and P-EAGLE can draft, the most frequent of the texts. None: all."
    )
    keep_states: bool = stated(True, "Keep the target's states on disk; else compute them in every epoch.")
    seed: WholeNumber = stated(0, "Seed of the initial weights. Medusa's have none by chance.")

    def __post_init__(self) -> None:
        if self.heads is None:
            object.__setattr__(self, "heads", 1 if self.kind == "eagle" else 4)
        if self.blocks is None:
            object.__setattr__(self, "blocks", 2 if self.kind == "dflash" else 1)
        if self.kind != "medusa" and self.share_output:
            raise UserError("share_output is of Medusa's heads: leave it out")
        if self.kind in ("eagle", "glide") and self.blocks != 1:
            raise UserError(
                f"blocks={self.blocks} does not go with kind={self.kind}, which has one layer: leave it out"
            )
        if self.kind in ("peagle", "dflash") and self.steps < 2:
            raise UserError(
                f"heads=1 is out of range: kind={self.kind} drafts two tokens a pass or more, kind=eagle3 one"
            )
        if self.kind == "eagle3" and self.steps < 3:
            raise UserError(
                f"heads={self.heads} is out of range: EAGLE-3 is trained on three of its own steps or more"
            )
        if self.kind not in ("eagle3", "peagle") and self.vocabulary is not None:
            raise UserError(
                "vocabulary goes with kind=eagle3 and peagle: the others end in output layers of all tokens"
            )
        if self.kind != "eagle" and self.regression != 10.0:
            raise UserError("regression goes with kind=eagle: the others learn no states")

    @property
    def steps(self) -> int:
        """``heads``, once it is chosen."""
        assert self.heads is not None
        return self.heads

    @property
    def depth(self) -> int:
        """``blocks``, once they are chosen."""
        assert self.blocks is not None
        return self.blocks


@checked
class TrainingSettings:
    """How the student is trained."""

    loss: str = stated("0.1*ce+0.9*tv", "ce, kl, reverse-kl, tv, or a mix such as 0.1*ce+0.9*tv.")
    warm_up: Share = stated(
        0.5, "Share of the steps that minimise ce+kl first. The gradient of total variation is small where the laws "
        "hardly overlap.",
    )  # fmt: skip
    steps: Positive | None = stated(None, "Steps, instead of --epochs. None: by --epochs.")
    epochs: Annotated[RealNumber, Field(ge=1e-3, le=1e6)] = stated(4.0, "Passes over the texts.")
    minutes: Annotated[RealNumber, Field(ge=1e-3, le=1e6)] | None = stated(
        None, "Maximum time of training; the schedule ends with it. None: no limit. How many steps are made then "
        "depends on the machine, so that no second run gives the same weights.",
    )  # fmt: skip
    tokens: Positive = stated(2048, "Tokens per step, prompts included.")
    lr: Annotated[RealNumber, Field(ge=1e-8, le=1)] = stated(
        1e-3, "Peak learning rate of AdamW. It rises over the first 2 % of the steps, and falls with a cosine to a "
        "tenth.",
    )  # fmt: skip
    decay: Share = stated(0.01, "Weight decay of matrices other than embeddings.")
    loss_temperature: Annotated[RealNumber, Field(ge=0.05, le=1)] | None = stated(
        None, "Temperature of the laws in the loss. None: that of the texts. Or 1 where that is out of range."
    )
    freeze_embeddings: bool = stated(False, "Keep the target's embeddings as they are.")
    on_policy: Share = stated(
        0.0, "Share of the steps, at the end, that also train on the draft's own drafts."
    )
    gamma: Positive = stated(5, "Length of those drafts.")
    checkpoint: Positive = stated(100, "Steps between checkpoints.")
    seed: WholeNumber = stated(0, "Seed of texts, weights and batches.")
    precision: Literal["float32", "bfloat16"] = stated(
        "float32", "Dtype of matrix products in training; bfloat16 is faster where the processor has it. And of those "
        "of the states that heads read, in their evaluation too where states are kept; weights, losses and other "
        "evaluation stay in float32.",
    )  # fmt: skip
    threads: Positive | None = stated(
        None, "CPU threads for training. None: torch's. Equal weights after a resumed run need equal numbers."
    )

    def shaping(self) -> dict[str, Any]:
        """The fields that tell one training from another: a run goes on with other threads or checkpoints."""
        rest = {name: value for name, value in asdict(self).items() if name not in ("threads", "checkpoint")}
        rest["temperature"] = rest.pop("loss_temperature")  # the name in the hashes of folders that there are
        if self.minutes is None:
            del rest["minutes"]
        return rest

    def __post_init__(self) -> None:
        from sprinter.training.drafts.losses import parse_loss  # imports torch

        object.__setattr__(self, "loss", str(parse_loss(self.loss)))
        if self.minutes is not None and self.on_policy:
            raise UserError(
                "minutes does not go with on_policy, which begins at a certain step: leave one out"
            )
