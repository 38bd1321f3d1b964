"""``sprinter generate --prompts FILE``: many texts, one JSON object per line, in the order of the file."""

from __future__ import annotations

import hashlib
import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.cli.pages import print_json
from sprinter.cli.progress import Progress
from sprinter.errors import RowsError, SprinterError, UserError
from sprinter.files import read_json_lines, write_atomic

if TYPE_CHECKING:
    from sprinter.engine.options import GenerationOptions
    from sprinter.engine.pair import Pair

__all__ = ["ROWS", "PromptLine", "ResultsFile", "generate_many", "read_prompts", "settings_of"]

ROWS = 8
"""Default number of texts that are generated, and written, at the same time."""

_FIX = "give another --out, or --restart to start again"


@dataclass(frozen=True, slots=True, eq=False)  # a key by identity: messages cannot be hashed
class PromptLine:
    """A prompt of a file.

    Attributes:
        index: index among the prompts, from 0. line: number of its line, from 1.
        prompt: text or messages; None: there is an error.
    """

    index: int
    line: int
    prompt: str | Sequence[Mapping[str, Any]] | None
    error: str | None = None

    def facts(self) -> dict[str, Any]:
        """The prompt as part of a JSON object; a text is without its token ids."""
        if isinstance(self.prompt, str):
            return {"prompt": {"text": self.prompt}}
        return {} if self.prompt is None else {"messages": self.prompt}


def read_prompts(
    file: Path, field: str | None, *, chat: bool = False, system: str | None = None
) -> list[PromptLine]:
    """The prompts of a ``.txt`` file, one per line, or of a ``.jsonl`` file, one object per line. Skips blank lines.

    A record with "messages" is a conversation; with ``chat`` a text is what a user says, after ``system``.

    A line without a valid prompt gives a ``PromptLine`` with an error.

    Raises:
        UserError: the file does not exist, is of another kind, is not UTF-8, or is empty.
    """
    from sprinter.engine.chat import conversation
    from sprinter.training.sources import prompt_of, read_lines

    if (kind := file.suffix) not in (".txt", ".jsonl"):
        raise UserError(
            f"--prompts '{file}' is of no known kind: give a .txt file, one prompt per line, or a .jsonl file"
        )
    if kind == ".txt" and field is not None:
        raise UserError(f"--field {field} is of .jsonl files, and '{file}' is text: leave it out")

    def prompt(index: int, line: int, text: str) -> PromptLine:
        try:
            given: Any = text
            if kind == ".jsonl":
                given = prompt_of(json_module.loads(text), field, f"line {line}")
            if not given:
                raise UserError(f"line {line} holds an empty prompt: give at least one word to continue")
            json_module.dumps(given, ensure_ascii=False).encode()
            given = conversation(given, system) if chat else given
        except UserError as error:
            return PromptLine(index, line, None, str(error))
        except ValueError as error:  # not JSON, or half of a surrogate pair
            return PromptLine(index, line, None, f"line {line} is not a JSON object in UTF-8: {error}")
        return PromptLine(index, line, given)

    try:
        lines = [(number, line) for number, line in read_lines(str(file)) if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read --prompts '{file}' ({error.strerror}): check the path") from None
    if not lines:
        raise UserError(f"--prompts '{file}' is empty: give one prompt per line")
    return [prompt(index, number, line) for index, (number, line) in enumerate(lines)]


class ResultsFile:
    """The file of results. Lines are appended; results that it already holds are not generated again.

    ``FILE.run.json`` next to it records what the results depend on: the settings, and what ``made_with`` adds once the
    models are loaded.

    Args:
        file: created with its directory if it does not exist.
        settings: JSON values that the results depend on.
        restart: delete existing results.

    Raises:
        UserError: the file holds results with other settings or something else, is not a regular file, or cannot be
            written.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self.file, self._about = file, file.with_name(f"{file.name}.run.json")
        if file.is_dir():
            raise UserError(f"--out '{file}' is a directory: give a file")
        if (file.exists() and not file.is_file()) or file.absolute().parent == Path("/dev"):
            raise UserError(
                f"--out '{file}' is not a regular file: give one, or leave --out out and redirect"
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if restart:
                file.unlink(missing_ok=True)
            self.rows, before = self._held()
            self._settings = before
            self.made_with(settings)
            self._keep_whole_lines()
        except OSError as error:
            raise UserError(f"cannot write --out '{file}' ({error.strerror}): give another file") from None

    def made_with(self, settings: Mapping[str, Any]) -> None:
        """Record further settings that the results depend on.

        Raises:
            UserError: the existing results were made with another value; names the first.
        """
        before = self._settings
        if self.rows and (other := [name for name in settings if before.get(name) != settings[name]]):
            raise UserError(
                f"--out '{self.file}' holds results with another {other[0].replace('_', ' ')}: {_FIX}"
            )
        self._write({**before, **settings})

    @property
    def costs(self) -> Any:
        """The costs of passes by which the existing results were decoded, as JSON values; {}: there are none."""
        return self._settings.get("costs", {})

    def keep_costs(self, costs: Mapping[str, Any]) -> None:
        """Record these, before results that depend on them."""
        kept = json_module.loads(json_module.dumps(costs))
        if kept != self.costs:
            self._write({**self._settings, "costs": kept})

    def _write(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        write_atomic(self._about, json_module.dumps(self._settings) + "\n")

    def _held(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The existing results, and the settings that they were made with."""
        if not self.file.is_file() or self.file.stat().st_size == 0:
            return [], {}
        try:
            before = json_module.loads(self._about.read_text(encoding="utf-8"))
            rows = read_json_lines(self.file)
            if [row["index"] for row in rows] != list(range(len(rows))):
                raise ValueError
            return rows, dict(before)
        except FileNotFoundError:
            raise UserError(f"--out '{self.file}' is not a file of results: {_FIX}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--out '{self.file}' is damaged: {_FIX}") from None

    def _keep_whole_lines(self) -> None:
        """Remove an incomplete last line, left by a killed process."""
        with open(self.file, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append results and flush them to disk."""
        with open(self.file, "ab") as file:
            file.write("".join(f"{json_module.dumps(row, allow_nan=False)}\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows += rows


def generate_many(
    pair: Pair, prompts: Sequence[PromptLine], options: GenerationOptions, *, rows: int, results: ResultsFile | None,
    json: bool,
) -> int:  # fmt: skip
    """Generate the missing texts. Returns the exit status, 1 if a prompt has no text.

    Args:
        options: options of all texts, except that prompt i has the seed ``options.seed`` + i.
        results: file for the lines; None: standard output.
        json: print one JSON object at the end.
    """
    from sprinter.engine.record import fingerprints, versions
    from sprinter.random import drawn_seed

    options = options.replace(seed=drawn_seed(options.seed))
    if results is not None:  # paths and names do not identify models
        numbers = {f"{name}_version": number for name, number in versions().items()}
        results.made_with({**fingerprints(pair.models, pair.heads, pair.drafting), **numbers})
        pair._runtime.use_measured(results.costs)
    texts = all(isinstance(prompt.prompt, str | None) for prompt in prompts)
    pair.stream(
        "a" if texts else [{"role": "user", "content": "a"}], options
    ).close()  # errors of all requests
    if results is not None:
        results.made_with(
            {"default_method": pair.method_for(options).name if options.method is None else None}
        )
    resumed = len(results.rows) if results is not None else 0
    failed = sum("error" in row for row in results.rows) if results is not None else 0
    with Progress(shown=results is not None or not sys.stdout.isatty()) as progress:
        for first in range(resumed, len(prompts), rows):
            found = _generate(pair, prompts[first : first + rows], options, rows)
            failed += sum("error" in row for row in found)
            if results is not None:
                results.keep_costs(pair._runtime.measured)
                results.add(found)
            else:
                for row in found:
                    print_json(row)
            progress(f"{failed} failed" if failed else "generating", first + len(found), len(prompts))
    if results is not None and resumed == len(prompts):
        print(f"all {resumed} prompts have their lines in '{results.file}' already", file=sys.stderr)
    if json:
        assert results is not None
        counts = {"prompts": len(prompts), "resumed": resumed, "failed": failed}
        print_json({"out": str(results.file), **counts})
    if failed:
        print(f"{failed} of {len(prompts)} prompts have no text; their lines say why", file=sys.stderr)
    return 1 if failed else 0


def _generate(
    pair: Pair, chunk: Sequence[PromptLine], options: GenerationOptions, rows: int
) -> list[dict[str, Any]]:
    """One object per prompt. Texts do not depend on each other: if a batch fails, each prompt is run by itself."""
    from sprinter.random import following_seed

    seeds = {prompt: following_seed(options.seed, prompt.index) for prompt in chunk}
    shown: dict[PromptLine, dict[str, Any]] = {one: {"error": one.error} for one in chunk}
    good = {prompt: prompt.prompt for prompt in chunk if prompt.prompt is not None}
    try:
        each = [options.replace(seed=seeds[prompt]) for prompt in good]
        outs = pair.generate_batch([*good.values()], each, rows=rows)
        shown |= {prompt: out.to_dict() for prompt, out in zip(good, outs, strict=True)}
    except RowsError as error:  # caused by --rows, not by a prompt
        raise UserError(f"--rows {rows} cannot be had: {error}") from None
    except SprinterError as error:
        if len(chunk) > 1:
            return [row for prompt in chunk for row in _generate(pair, [prompt], options, rows)]
        shown = {chunk[0]: {"error": str(error)}}
    return [
        {"index": one.index, "line": one.line, "seed": seeds[one], **one.facts(), **shown[one]}
        for one in chunk
    ]


def settings_of(
    file: Path, options: GenerationOptions, models: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The settings that results depend on, as JSON values; ``more``: options that shape the prompts."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    found = {"prompts": digest, **more, **options.to_dict(), "models": dict(models)}
    return dict(json_module.loads(json_module.dumps(found)))
