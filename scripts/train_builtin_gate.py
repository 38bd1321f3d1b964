"""Train the built-in gate with ``sprinter.training``, by the steps that a user takes: label, train, evaluate, save.

    python scripts/train_builtin_gate.py --data DIR --pair DIR --out DIR

Training prompts come from the pair's training documents, the report from documents that neither pair nor gate was
trained on. Texts come in the four prefix classes in equal parts: original, draft's completion, target's completion,
both in turn. The labels are kept under ``--work``, so that an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

import sprinter
from pair_data import Document, UsageError, missing_files, read_documents
from sprinter.training.card import CardWords, save_trained
from sprinter.training.dataset import read_positions
from sprinter.training.label_run import LabelSettings, label
from sprinter.training.roc import judge_directory
from sprinter.training.settings import TrainSettings
from sprinter.training.train import train

NAMES = {"draft_id": "sprinter-builtin-draft", "target_id": "sprinter-builtin-target"}


def pick(documents: list[Document], count: int) -> list[str]:
    """``count`` documents, sources in proportion, in a stable order."""
    step = max(1, len(documents) // count)
    return [document.text for document in documents[::step] if len(document.text) > 400][:count]


def label_texts(
    pair: sprinter.Pair, texts: list[str], work: Path, name: str, settings: LabelSettings
) -> Path:
    """Directory of the labels of these texts."""
    file, out = work / f"{name}.jsonl", work / name
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    with Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"labelling {name}", total=1.0)
        label(pair, [file], out, settings, progress=lambda at: bar.update(task, completed=at.share))
    return out


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the text files")
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the gate")
    parser.add_argument("--work", type=Path, help="folder for the labels; a temporary one if left out")
    parser.add_argument("--documents", type=int, default=300, help="training documents, each in four classes")
    parser.add_argument("--test-documents", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64, help="labelled positions a text")
    parser.add_argument("--head", default="linear")
    parser.add_argument("--label", default="overlap")
    parser.add_argument("--features", default="hidden")
    parser.add_argument("--drift", type=float, default=0.1, help="that the gate's τ is chosen for")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make(args: argparse.Namespace, work: Path) -> None:
    """Label, train, judge, save."""
    settings = TrainSettings(args.head, args.label, args.features, args.seed, drift=args.drift)
    pair = sprinter.load_pair(args.pair / "target", draft=args.pair / "draft", dtype="float32")
    documents = read_documents(args.data)
    seen, unseen = ([d for d in documents if d.held_out is held_out] for held_out in (False, True))
    how = LabelSettings(seed=args.seed, new_tokens=args.new_tokens, classes_per_prompt=4)
    train_labels = label_texts(pair, pick(seen, args.documents), work, "training-documents", how)
    test_labels = label_texts(pair, pick(unseen, args.test_documents), work, "held-out-documents", how)
    positions = read_positions([train_labels], settings.inputs)
    trained = train(positions, settings, lambda epoch: print(epoch, file=sys.stderr))
    report = judge_directory(trained.head, [test_labels])
    trained.head.config = replace(trained.head.config, **NAMES)
    command = (
        f"python scripts/train_builtin_gate.py --documents {args.documents} --new-tokens {args.new_tokens} "
        f"--head {args.head} --label '{args.label}' --features '{args.features}' --seed {args.seed}"
    )
    words = CardWords(
        title="Built-in gate of Sprinter",
        licence="cc-by-sa-3.0",
        made=f"Made by `{command}` from the pair's training documents. Licences of the data: see the built-in target.",
        judged="documents that neither pair nor gate was trained on",
    )
    save_trained(trained, report, positions, args.out, words)
    print(json.dumps(report.summary()))


def main() -> int:
    """Check the folders, then make the gate."""
    args = parse()
    if missing := missing_files(args.data):
        raise UsageError(
            f"--data {args.data} lacks {', '.join(missing)}: give the folder with the text files"
        )
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
        make(args, args.work)
        return 0
    with tempfile.TemporaryDirectory() as work:
        make(args, Path(work))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UsageError, sprinter.UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
