"""Settings of distilling a draft: the texts, the student, training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sprinter.decode.checks import at_least, between, one_of, positive, whole
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.training.drafts.losses import parse_loss
from sprinter.training.sources import check_reading

__all__ = ["HeadSettings", "StudentSettings", "TextSettings", "TrainingSettings"]

HEADS_THAT_DRAFT = ("medusa", "eagle", "eagle3", "glide")
"""Kinds that ``sprinter draft train`` makes."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What the texts depend on, besides target and data.

    Args:
        seed: seed of the texts that the target writes; text i has seed ``seed + i``.
        temperature: temperature that the target writes at. Its laws are stored raw (temperature 1).
        new_tokens: maximum number of tokens of an answer.
        prompt_tokens: maximum prompt length; running texts are truncated, examples beyond it are skipped.
        prompt_share: share of a running text's words that is its prompt.
        top: number of most probable tokens that are stored of each law; the others are one further outcome.
        rows: texts that are written at the same time; on a GPU there are more, see ``training.drafts.waves``.
        shard: texts per shard, the unit of resuming.
        held_out: share of the prompts, chosen by a hash of their tokens, that the draft is evaluated on.
        limit: maximum number of texts to read; None: all.
        field, split, chat, system: how the data are read, as in ``sprinter gate label``.
    """

    seed: int = 0
    temperature: float = 1.0
    new_tokens: int = 256
    prompt_tokens: int = 512
    prompt_share: float = 0.3
    top: int = 64
    rows: int = 32
    shard: int = 96
    held_out: float = 0.05
    limit: int | None = None
    field: str | None = None
    split: str = "lines"
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        whole("seed", self.seed)
        Sampling(temperature=self.temperature)
        positive(self, "new_tokens", "prompt_tokens", "top", "rows", "shard")
        between("prompt_share", self.prompt_share, 0.0, 1.0)
        between("held_out", self.held_out, 0.0, 0.5)
        check_reading(self)


@dataclass(frozen=True, slots=True)
class StudentSettings:
    """Shape of the student, a Llama model with the target's tokenizer.

    Args:
        layers: number of decoder layers.
        width: hidden size, a multiple of ``2 * heads``; None: the target's. A smaller one projects the target's
            embeddings by a truncated singular value decomposition.
        heads: attention heads; None: one per 64 hidden units, at least one.
        feed_forward: width of the feed-forward layers; None: 8/3 of the hidden size, rounded up to a multiple of 32.
        vocabulary: number of tokens that the output layer knows, the most frequent ones of the target's texts; q is 0
            for all others. None: all tokens, and a folder that other engines load too.
        context: maximum text length; None: the target's, at most 8192.
        seed: seed of the initial weights.
    """

    layers: int = 2
    width: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        whole("seed", self.seed)
        positive(self, "layers", "width", "heads", "feed_forward", "vocabulary", "context")
        if self.width is not None and self.width % (2 * (self.heads or 1)):
            raise UserError(
                f"width={self.width} cannot be split into {self.heads or 1} heads of an even size: "
                f"give a multiple of {2 * (self.heads or 1)}"
            )


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Shape of heads on the target that draft.

    Args:
        kind: "medusa", "eagle", "eagle3" or "glide".
        heads: number of Medusa's heads, tokens ahead that are drafted; of the others, steps of training
            ahead of what the target has read. None: 1 for "eagle", as its authors train it, else 4.
        blocks: residual blocks of each of Medusa's heads.
        share_output: all of Medusa's heads end in the target's output layer, a fraction of the parameters; else each
            in one of its own, which begins as a copy.
        discount: weight of the loss of each further head or step, relative to the one before (both papers: 0.8).
        regression: weight of EAGLE's loss of states, relative to that of laws (paper: 10).
        vocabulary: tokens that EAGLE-3 can draft, the most frequent ones of the target's texts; None: all.
        keep_states: compute the target's states once and keep them on disk; else in every epoch.
        seed: seed of the initial weights; Medusa's have none by chance.
    """

    kind: str = "medusa"
    heads: int | None = None
    blocks: int = 1
    share_output: bool = False
    discount: float = 0.8
    regression: float = 10.0
    vocabulary: int | None = None
    keep_states: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("kind of heads", self.kind, HEADS_THAT_DRAFT)
        if self.heads is None:
            object.__setattr__(self, "heads", 1 if self.kind == "eagle" else 4)
        for name in ("heads", "blocks"):
            at_least(name, getattr(self, name), 1, 16)
        between("regression", self.regression, 0.0, 1e6)
        between("discount", self.discount, 0.0, 1.0)
        whole("seed", self.seed)
        positive(self, "vocabulary")
        if self.kind != "medusa" and (self.blocks != 1 or self.share_output):
            raise UserError("blocks and share_output are of Medusa's heads: leave them out")
        if self.kind == "eagle3" and self.steps < 3:
            raise UserError(
                f"heads={self.heads} is out of range: EAGLE-3 is trained on three of its own steps or more"
            )
        if self.kind != "eagle3" and self.vocabulary is not None:
            raise UserError("vocabulary goes with kind=eagle3: the others end in output layers of all tokens")
        if self.kind != "eagle" and self.regression != 10.0:
            raise UserError("regression goes with kind=eagle: the others learn no states")

    @property
    def steps(self) -> int:
        """``heads``, once it is chosen."""
        assert self.heads is not None
        return self.heads


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How the student is trained.

    Args:
        loss: what is minimised: ``ce``, ``kl``, ``reverse-kl``, ``tv``, or a mix such as ``0.1*ce+0.9*tv``.
        warm_up: share of the steps that minimise ``ce+kl`` instead: the gradient of total variation is small where
            the laws hardly overlap.
        steps: number of optimizer steps; None: as many as ``epochs`` passes over the texts take.
        epochs: passes over the texts, if ``steps`` is None.
        minutes: maximum time of training; the learning rate has fallen when it is over. None: no limit. How many steps
            are made then depends on the machine, so that no second run gives the same weights.
        tokens: tokens per step, prompts included.
        lr: peak learning rate of AdamW; it rises over the first 2 % of the steps and falls with a cosine to a tenth.
        decay: weight decay of matrices other than embeddings.
        temperature: temperature of both laws in the loss, above 0 and up to 1; None: that of the texts, or 1 where that
            is out of range.
        freeze_embeddings: keep the embeddings, which come from the target, as they are.
        on_policy: share of the steps, the last ones, that also see positions of the student's own drafts.
        gamma: length of those drafts.
        checkpoint: number of steps between checkpoints.
        seed: seed of the order of texts and of the drafts.
        precision: dtype of matrix products in training, and of those of the states that heads read, in their evaluation
            too where states are kept; weights, losses and other evaluation stay in float32.
        threads: number of CPU threads; None: torch's own choice. Equal weights after a resumed run need equal numbers.
    """

    loss: str = "0.1*ce+0.9*tv"
    warm_up: float = 0.5
    steps: int | None = None
    epochs: float = 4.0
    minutes: float | None = None
    tokens: int = 2048
    lr: float = 1e-3
    decay: float = 0.01
    temperature: float | None = None
    freeze_embeddings: bool = False
    on_policy: float = 0.0
    gamma: int = 5
    checkpoint: int = 100
    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None

    def shaping(self) -> dict[str, Any]:
        """The fields that tell one training from another: a run goes on with other threads or checkpoints."""
        rest = {name: value for name, value in asdict(self).items() if name not in ("threads", "checkpoint")}
        if self.minutes is None:
            del rest["minutes"]
        return rest

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", str(parse_loss(self.loss)))
        one_of("precision", self.precision, ("float32", "bfloat16"))
        whole("seed", self.seed)
        between("warm_up", self.warm_up, 0.0, 1.0)
        between("on_policy", self.on_policy, 0.0, 1.0)
        between("epochs", self.epochs, 1e-3, 1e6)
        between("lr", self.lr, 1e-8, 1.0)
        between("decay", self.decay, 0.0, 1.0)
        if self.temperature is not None:
            between("temperature", self.temperature, 0.05, 1.0)
        if self.minutes is not None:
            between("minutes", self.minutes, 1e-3, 1e6)
            if self.on_policy:
                raise UserError(
                    "minutes does not go with on_policy, which begins at a certain step: leave one out"
                )
        positive(self, "tokens", "gamma", "checkpoint", "steps", "threads")
