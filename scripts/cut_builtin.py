"""Make a pair that writes simple stories: its target is eight layers of SmolLM2-135M-Instruct on 8,192 tokens.

    python scripts/cut_builtin.py teacher --data DATA --out OUT --minutes 15    all its layers, tuned to the stories
    python scripts/cut_builtin.py write --data DATA --out OUT --limit 9984      the teacher's stories and their laws
    python scripts/cut_builtin.py target --data DATA --out OUT --minutes 90     ten layers, trained on all texts
    python scripts/cut_builtin.py target --data DATA --out BUILTIN --start OUT/target --without 2 3 --minutes 48
    python scripts/cut_builtin.py show --data DATA --out OUT                    losses on held-out stories, ten texts

A stage that was interrupted is continued by the same command. ``write`` with a larger limit writes more, and --part
begins other stories, so that several processes can write. ``target --start FOLDER`` trains an earlier target further,
on the texts that there are by then; --without names layers of it that go first. BUILTIN is a copy of OUT without its
``target`` and ``training-*``. DATA is the folder with the text files; of these, about one document in a hundred is
never trained on (``bench.suites.heldout``). SmolLM2 is found like any other model. ``finish_builtin`` makes the rest of
the pair.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sprinter.bench.suites import heldout
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.models.gguf.tokenizer import gguf_tokenizer
from sprinter.models.pair import load_models
from sprinter.models.source import find
from sprinter.training.drafts.data import TargetText, Texts, write_texts
from sprinter.training.drafts.losses import tempered
from sprinter.training.drafts.settings import TextSettings, TrainingSettings
from sprinter.training.drafts.student import save_student
from sprinter.training.drafts.train import StudentLearner, train
from train_builtin import CONTEXT, EOS, problems

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"
STORIES = "tinystories_sample.txt.gz"
EOS_ID = 0
VOCABULARY = (
    8192  # tokens: in 4,096, one word of a story in 26 was cut in pieces, of which made-up words came
)
GENERAL = 0.15  # share of their count that is not the stories'
LAYERS = (
    0,
    1,
    2,
    8,
    11,
    21,
    24,
    27,
    28,
    29,
)  # of the teacher's 30: those that are left when, again and again, the one
NEURONS = 768  # goes without which the loss on stories is least; and of 1,536 in each
WRITES = "int8"  # the dtype in which the teacher writes
TOP = 16  # of the teacher's tokens with their probabilities; all others are one more outcome
TUNED = 10  # the teacher's last layers
TEMPERATURE = 0.75  # of the teacher when it writes
SHARPER = (
    0.65  # the target's laws are the teacher's at this temperature: few layers have no room for its tail
)
OTHERS = 8  # one in so many texts that are no stories is trained on: more would take room in few layers
LONGEST = 256  # tokens of a text
BEGUN = 32  # of them before the teacher goes on
OPENED, ROWS = 20_000, 64  # beginnings of stories of a part; stories that are written at a time
REPEATS = 0.85  # a story in which fewer of the groups of four tokens differ goes round in circles
WORD = re.compile(rb"[a-z]+")

WORDS = {
    "name": "Lily Mia Anna Sara Emma Ruby Rosie Lucy Molly Ella Grace Daisy Nora Amy Zoe Jane Kate Sue Mary Bella Ivy "
    "Tom Ben Max Sam Tim Jack Leo Finn Luke Noah Peter Billy Adam Dan Joe Mark Oliver Harry Toby Charlie Bob Theo Will",
    "hero": "girl boy girl boy girl boy dog cat rabbit bear fox mouse bird duck frog pig cow horse squirrel owl turtle "
    "elephant lion monkey sheep hen goat bee butterfly fish whale dragon kitten puppy hedgehog penguin",
    "trait": "little brave shy happy kind clever lonely curious lazy funny sad hungry tiny small proud friendly silly",
    "thing": "ball kite balloon doll book hat cake apple basket boat bell box blanket drum flower key lamp map stone "
    "shell umbrella bike seed egg coat pie carrot mirror ring rope shoe spoon star train leaf cookie candle pencil",
    "place": "park forest garden beach farm river school kitchen lake hill town market tree sea meadow house barn pond "
    "mountain playground snow library zoo village",
}
OPENINGS = (
    "Once upon a time,", "Once upon a time, a {trait} {hero} named {name}", "One day,", "One day, {name}",
    "Once upon a time, there was a {trait} {hero} named {name}.", "{name} was a {trait} {hero}.", "Every day, {name}",
    "There was once a {trait} {hero} named {name}.", "{name} loved to", "In a small house near the {place},",
    "One sunny morning,", "{name} had a {thing}.", "It was a cold day.", "Once there was a {hero} named {name}.",
    "Once upon a time a {trait} {hero} found a {thing} in the {place}.", "{name} was sad.", "{name} woke up early.",
    "The {trait} {hero} was", "Long ago,", '"Look!" said {name}.', "{name} wanted a {thing}.", "The {thing} was",
    "{name} went to the {place} with mom.",
)  # fmt: skip

SHOWN = (
    "Once upon a time, there was a little",
    "A small hedgehog found a red umbrella under the apple tree. She",
    "Tom and his mom went to the park.",
    "Once upon a time, there was a girl named Lily. She had a cat.",
    '"Look!" said Ben.',
    "It was a cold day.",
    "The brave little mouse",
    "One day, Sam lost his ball.",
    "In the forest there was an old owl.",
    "Grandma baked a cake.",
)
SHOWN_TOKENS = 100


# --- texts ------------------------------------------------------------------------------------------------------------
def trained_on(text: str) -> bool:
    """Whether a document is not held out."""
    return not heldout.held_out(text)


def plain_texts(data: Path) -> Iterator[tuple[str, str]]:
    """Source and text of what is trained on beside the teacher's stories."""
    for _, record in heldout.stories(str(data / STORIES), trained_on):
        yield "tinystories", record["text"]
    for number, (_, record) in enumerate(problems(str(data / "gsm8k_train.jsonl.gz"), trained_on)):
        if number % 2 == 0:
            yield "gsm8k", record["text"]
    for number in range(6):
        for _, record in heldout.wikipedia(str(data / f"wikipedia_en_2015_{number:02d}.txt.gz"), trained_on):
            long = [part for part in record["text"].split("\n") if len(part) > 150]
            if long and "." in long[0]:
                yield "wikipedia", long[0].rpartition(".")[0] + "."


def opening(chance: random.Random, stories: Sequence[str]) -> str:
    """How a story begins: made up, or the first words of a story."""
    if chance.random() < 0.5:
        words = chance.choice(stories).split(" ")
        return " ".join(words[: chance.randint(3, 20)])
    picked = {what: chance.choice(own.split()) for what, own in WORDS.items()}
    return chance.choice(OPENINGS).format(**picked)


# --- vocabulary and weights -------------------------------------------------------------------------------------------
def cut_tokenizer(whole: Tokenizer, texts: Sequence[tuple[str, str]]) -> tuple[Tokenizer, Tensor]:
    """The most frequent tokens, each with those that it is merged from; and their ids before, -1 where there is none.

    All bytes are kept, so that every text has tokens.
    """
    counts = {True: collections.Counter[int](), False: collections.Counter[int]()}
    for (source, _), found in zip(texts, whole.encode_batch_fast([text for _, text in texts]), strict=True):
        counts[source == "tinystories"].update(found.ids)
    totals = {own: sum(count.values()) for own, count in counts.items()}
    weight = {True: 1 - GENERAL, False: GENERAL}
    score = {
        token: sum(weight[own] * counts[own][token] / totals[own] for own in counts)
        for token in counts[True] | counts[False]
    }
    spec = json.loads(whole.to_str())
    before: dict[str, int] = spec["model"]["vocab"]
    names, pairs = {own: name for name, own in before.items()}, dict[str, tuple[str, str]]()
    for left, right in spec["model"]["merges"]:
        pairs.setdefault(left + right, (left, right))
    kept = {EOS, *pre_tokenizers.ByteLevel.alphabet()}
    for token in sorted(score, key=lambda one: (-score[one], one)):
        needed, open_ = set[str](), [names[token]]
        while open_:
            name = open_.pop()
            if name not in kept and name not in needed:
                needed.add(name)
                open_ += pairs[name]
        if len(kept) + len(needed) <= VOCABULARY:
            kept |= needed
    order = [EOS, *sorted(kept - {EOS}, key=lambda name: (before.get(name, len(before)), name))]
    ids = {name: number for number, name in enumerate(order)}
    spec["model"]["vocab"] = ids
    spec["model"]["merges"] = [two for two in spec["model"]["merges"] if {*two, "".join(two)} <= kept]
    spec["added_tokens"] = [{**one, "id": ids[EOS]} for one in spec["added_tokens"] if one["content"] == EOS]
    spec["post_processor"] = None
    return Tokenizer.from_str(json.dumps(spec)), torch.tensor([before.get(name, -1) for name in order])


@torch.no_grad()
def cut_model(
    whole: Any, ids: Tensor, layers: Sequence[int], neurons: dict[int, Tensor] | None
) -> LlamaForCausalLM:
    """A model of some layers of ``whole``, on the tokens ``ids``; ``neurons``: which of each layer's are kept."""
    own = whole.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ids), hidden_size=own.hidden_size, num_hidden_layers=len(layers),
            intermediate_size=own.intermediate_size if neurons is None else NEURONS,
            num_attention_heads=own.num_attention_heads, num_key_value_heads=own.num_key_value_heads,
            max_position_embeddings=CONTEXT, rms_norm_eps=own.rms_norm_eps, rope_parameters=own.rope_parameters,
            tie_word_embeddings=neurons is not None, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=EOS_ID,
        )
    )  # fmt: skip
    table = whole.get_input_embeddings().weight
    rows = torch.where(ids[:, None] < 0, table.mean(0), table[ids.clamp(min=0)])
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        embedding.weight.copy_(rows)
    model.get_input_embeddings().padding_idx = None  # the end of a text is a token like any other
    model.model.norm.load_state_dict(whole.model.norm.state_dict())
    for layer, number in zip(model.model.layers, layers, strict=True):
        state = whole.model.layers[number].state_dict()
        if neurons is not None:
            for name in ("gate", "up"):
                state[f"mlp.{name}_proj.weight"] = state[f"mlp.{name}_proj.weight"][neurons[number]]
            state["mlp.down_proj.weight"] = state["mlp.down_proj.weight"][:, neurons[number]]
        layer.load_state_dict(state)
    return model


@torch.no_grad()
def best_neurons(model: nn.Module, texts: Sequence[TargetText]) -> dict[int, Tensor]:
    """By layer, the neurons that add most to the states on some texts."""
    sums: dict[int, Tensor] = {}

    def listen(number: int) -> Any:
        def add(down: nn.Linear, given: tuple[Tensor, ...]) -> None:
            size = given[0].abs().flatten(0, 1).sum(0) * down.weight.norm(dim=0)
            sums[number] = sums.get(number, torch.zeros_like(size)) + size

        return add

    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(listen(number))
        for number, layer in enumerate(model.model.layers)
    ]
    for text in texts:
        model(text.ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {number: one.topk(NEURONS).indices.sort().values for number, one in sums.items()}


# --- stages -----------------------------------------------------------------------------------------------------------
class Recipe:
    """What the stages share: SmolLM2, the vocabulary, the folders."""

    def __init__(self, data: Path, out: Path) -> None:
        self.data, self.out, self.known = data, out, None
        self.plain = [*plain_texts(data)]
        path = find(SMOLLM2, "target").gguf
        assert path is not None
        own, self.ids = cut_tokenizer(gguf_tokenizer(path).backend_tokenizer, self.plain)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=own, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT
        )

    @torch.no_grad()
    def cut(self, layers: Sequence[int] | None = None) -> LlamaForCausalLM:
        """All of SmolLM2's layers, or some of the teacher's without most of their neurons."""
        if layers is None:
            whole: Any = load_models(SMOLLM2, dtype="float32", dequantise=True).target.module("a cut")
            return cut_model(whole, self.ids, range(whole.config.num_hidden_layers), None)
        whole = LlamaForCausalLM.from_pretrained(self.out / "teacher", dtype=torch.float32)
        whole.get_input_embeddings().weight.copy_(whole.get_output_embeddings().weight)
        neurons = best_neurons(whole, self.encoded("tinystories")[:12])
        return cut_model(whole, torch.arange(len(self.ids)), layers, neurons)

    def up_to_unknown(self, text: TargetText) -> TargetText:
        """A text up to its first word that no plain text has: what the teacher makes up is often no word at all."""
        if self.known is None:
            self.known = frozenset(
                word for _, one in self.plain for word in WORD.findall(one.lower().encode())
            )
        tokens = [one for one in self.tokenizer.convert_ids_to_tokens(text.ids.tolist()) if one != EOS]
        written = self.tokenizer.decode(text.ids, skip_special_tokens=True).lower().encode()
        unknown = next(
            (one.start() for one in WORD.finditer(written) if one[0] not in self.known), len(written)
        )
        ends = accumulate(len(one) for one in tokens)  # a letter of a token is a byte
        count = len(text.ids) if unknown == len(written) else sum(end <= unknown for end in ends)
        laws = max(0, count - text.prompt)
        return replace(
            text, ids=text.ids[:count], top_ids=text.top_ids[:laws], top_probs=text.top_probs[:laws]
        )

    def encoded(self, *sources: str, every: int = 1) -> list[TargetText]:
        """Plain texts of these sources, or one in ``every``."""
        return self._parts([text for source, text in self.plain if source in sources][::every])

    def held_out(self) -> list[TargetText]:
        """The stories that are never trained on."""
        records = heldout.stories(str(self.data / STORIES))
        return [replace(text, held_out=True) for text in self._parts([one["text"] for _, one in records])]

    def _parts(self, texts: Sequence[str]) -> list[TargetText]:
        """Texts in parts of ``LONGEST`` tokens; the law of a token is that token."""
        found = []
        for own in self.tokenizer(texts, add_special_tokens=False)["input_ids"]:
            ids = torch.tensor([*own, EOS_ID])
            found += [as_drawn(part) for part in ids.split(LONGEST) if len(part) > 8]
        return found

    def openings(self, part: int) -> Path:
        """The file of beginnings of stories of a part."""
        path = self.out / f"openings-{part}.jsonl"
        if not path.is_file():
            chance = random.Random(part)
            stories = [text for source, text in self.plain if source == "tinystories"]
            found = (opening(chance, stories) for _ in range(2 * OPENED))
            short = (one for one in found if len(self.tokenizer(one)["input_ids"]) <= BEGUN)
            lines = [{"prompt": one, "task": "written"} for one in islice(short, OPENED)]
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))
        return path

    def write(self, part: int, limit: int) -> Texts:
        """The teacher's first stories of a part, and their laws."""
        settings = TextSettings(
            seed=part * OPENED, temperature=TEMPERATURE, new_tokens=LONGEST - BEGUN, prompt_tokens=BEGUN, limit=limit,
            held_out=0.0, rows=ROWS, shard=ROWS,
        )  # fmt: skip
        models = load_models(self.out / "teacher", dtype=WRITES, compile=True)
        return write_texts(Pair(models), [self.openings(part)], self.out / f"written-{part}", settings, said)

    def written(self) -> list[TargetText]:
        """The teacher's stories that are there, up to its first unknown word; each token with the law to learn."""
        found = []
        for folder in sorted(self.out.glob("written-[0-8]")):  # 9: of the gate, see finish_builtin
            there = len([*folder.glob("*.safetensors")]) * ROWS
            for text in self.write(int(folder.name.partition("-")[2]), there).texts if there else ():
                text = self.up_to_unknown(text)
                groups = {*zip(*(text.ids[at:].tolist() for at in range(4)), strict=False)}
                if len(text.top_ids) > BEGUN and len(groups) > REPEATS * len(text.ids):
                    laws = tempered(text.laws, SHARPER)
                    found.append(replace(text, top_ids=laws.ids[:, :TOP], top_probs=laws.probs[:, :TOP]))
        return found


def said(point: Any, steps: int | None = None) -> None:
    """Tell progress of writing or training."""
    print(point if steps is None else f"{point} of {steps} steps", file=sys.stderr, flush=True)


def as_drawn(ids: Tensor) -> TargetText:
    """A text without laws: the law of each token is that token, beside others of probability 0."""
    count = len(ids) - 1
    return TargetText(ids, 1, ids[1:, None].expand(count, TOP), torch.eye(1, TOP).expand(count, TOP), "plain")


def assembled(texts: Sequence[TargetText]) -> Texts:
    """Texts to train on, known by their tokens and laws."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.ids.numpy().tobytes() + text.top_probs.numpy().tobytes())
    return Texts(tuple(texts), {"hash": digest.hexdigest(), "settings": {"temperature": 1.0}})


def tune_teacher(recipe: Recipe, minutes: float, threads: int) -> None:
    """All of SmolLM2's layers on the small vocabulary; the last ones and the output layer learn the stories."""
    model = recipe.cut()
    for layer in model.model.layers[:-TUNED]:
        layer.requires_grad_(False)
    settings = TrainingSettings(
        loss="ce", warm_up=0, minutes=minutes, epochs=1, lr=2e-4, precision="bfloat16", checkpoint=20, threads=threads
    )  # fmt: skip
    train(
        model,
        assembled(recipe.held_out() + recipe.encoded("tinystories")),
        settings,
        recipe.out / "tuning",
        progress=said,
    )
    save_student(model, recipe.tokenizer, recipe.out / "teacher", (EOS_ID,))


def shorter(start: Path, without: Sequence[int]) -> LlamaForCausalLM:
    """An earlier target, without some of its layers."""
    model: Any = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    layers = [layer for number, layer in enumerate(model.model.layers) if number not in without]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.model.layers, model.config.num_hidden_layers = nn.ModuleList(layers), len(layers)
    model.get_input_embeddings().padding_idx = None
    return model  # type: ignore[no-any-return]


def train_target(
    recipe: Recipe, minutes: float, threads: int, start: Path | None, without: Sequence[int]
) -> None:
    """Fewer and narrower layers, fresh or from an earlier training, on the teacher's stories and plain texts."""
    told = Path(f"{start}.json") if start is not None else None
    facts = json.loads(told.read_text()) if told is not None else {"layers": list(LAYERS), "runs": []}
    written, plain = recipe.written(), recipe.held_out() + recipe.encoded("tinystories")
    plain += recipe.encoded("gsm8k", "wikipedia", every=OTHERS)
    if start is None:
        model = recipe.cut(LAYERS)
    else:
        model = shorter(start, without)
        facts["layers"] = [own for number, own in enumerate(facts["layers"]) if number not in without]
    settings = TrainingSettings(
        loss="kl", warm_up=0, minutes=minutes, epochs=20, lr=1e-3, decay=0.1, precision="bfloat16", threads=threads
    )  # fmt: skip
    texts = assembled([*written, *plain])
    run = train(model, texts, settings, recipe.out / f"training-{texts.info['hash'][:8]}", progress=said)
    save_student(model, recipe.tokenizer, recipe.out / "target", (EOS_ID,))
    tokens, last = sum(len(text.ids) for text in texts.texts), run.history[-1].train
    facts["runs"] += [
        f"{len(facts['layers'])} layers: "
        f"{run.done:,} steps, {run.tokens:,} positions in {run.seconds / 60:.0f} minutes, {len(written):,} stories of "
        f"the teacher, {len(plain):,} other texts, {tokens:,} tokens; at the end KL {last['kl']:.2f}"
    ]
    write_atomic(recipe.out / "target.json", json.dumps(facts) + "\n")


@torch.no_grad()
def losses(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Mean losses of teacher, target and finished target on the held-out stories."""
    found = {}
    for role in ("teacher", "target", "pair/target"):
        if (recipe.out / role / "config.json").is_file():
            model = load_models(recipe.out / role, dtype="float32").target.module("losses")
            found[role] = StudentLearner(model, 1.0).held_out(recipe.held_out(), 2048)
    return found


def samples(target: Path, temperature: float) -> Iterator[str]:
    """How the target goes on after some beginnings, at seeds 0, 1, 2, ..."""
    pair = Pair(load_models(target))
    for seed, begun in enumerate(SHOWN):
        out = pair.generate(
            begun, method="autoregressive", seed=seed, temperature=temperature, max_new_tokens=SHOWN_TOKENS
        )
        yield f"**{begun}**" + out.text.replace("\n", " / ")


@torch.no_grad()
def show(recipe: Recipe) -> None:
    """Print losses, and texts of the target at two temperatures."""
    for role, loss in losses(recipe).items():
        print(role, loss)
    for heat in (1.0, 0.7):
        print(f"temperature {heat}", *samples(recipe.out / "target", heat), sep="\n--- ")


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=("teacher", "write", "target", "show"))
    add("--data", type=Path, required=True, help="folder with the text files")
    add("--out", type=Path, required=True, help="folder of all results")
    add("--minutes", type=float, default=30.0, help="of training")
    add("--limit", type=int, default=4800, help="stories of a part to write")
    add("--part", type=int, default=0, help="stories of other parts begin otherwise")
    add("--start", type=Path, help="an earlier target to train further")
    add("--without", type=int, nargs="*", default=(), help="layers of --start that go")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        recipe = Recipe(args.data, args.out)
        if args.stage == "teacher":
            tune_teacher(recipe, args.minutes, args.threads)
        elif args.stage == "write":
            recipe.write(args.part, args.limit)
        elif args.stage == "show":
            show(recipe)
        else:
            train_target(recipe, args.minutes, args.threads, args.start, args.without)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
