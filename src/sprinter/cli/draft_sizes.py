"""``sprinter draft sizes``: which size of draft pays on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.draft_common import load_target, on_texts, on_training, trains, writes
from sprinter.cli.loading import Loading, loads
from sprinter.cli.options import ON_TARGET, DataOption, JsonOption, MoreOption
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option
from sprinter.training.drafts.settings import TextSettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sprinter.decode.costs import PassCosts
    from sprinter.engine.pair import Pair

__all__ = ["command"]


@loads(*ON_TARGET)
@writes()
@trains("tokens", "lr", "seed", "threads")
def command(
    data: DataOption,
    out: Annotated[Path, option("Folder for texts and checkpoints.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    shape: Annotated[
        list[str] | None,
        option("LAYERS, LAYERSxWIDTH or LAYERS/VOCABULARY; may be repeated.", default="1, 2 and 4 layers"),
    ] = None,
    steps: Annotated[int, option("Steps of each short training.")] = 200,
    positions: Annotated[
        float, option("Positions that the full training is to see, for the expected β.")
    ] = 1e6,
    draft_dtype: Annotated[
        str | None, option("dtype of the draft when its steps are timed.", default="the target's")
    ] = None,
    training: TrainingSettings = TrainingSettings(),
    texts: TextSettings = TextSettings(),
    json: JsonOption = False,
) -> None:
    """Tell which size of draft pays: short trainings of several shapes, and the costs of their steps here.

    Give --out of a distillation to use its texts. An interrupted run continues.
    """
    from sprinter.training.drafts.data import write_texts
    from sprinter.training.drafts.sizes import check_plan, table_of, try_shapes

    texts = replace(texts, seed=training.seed)
    training = replace(training, steps=steps, checkpoint=max(1, steps // 8))
    shapes = shape or ["1", "2", "4"]
    check_plan(shapes, steps, positions)
    pair, weights = load_target(loading)
    written = write_texts(pair, [*data, *(more or ())], out / "texts", texts, on_texts)
    dtype = draft_dtype or (loading.dtype if loading.dtype != "gguf" else "int8") or "auto"
    found = try_shapes(
        pair, weights, written, shapes, training, out / "shapes",
        lambda student, shape: _costs(pair, student, dtype),
        lambda shape, point, wanted: on_training(point, wanted, f"{shape}: "),
    )  # fmt: skip
    result = table_of(found, positions)
    if json:
        print_json(result)
        return
    _show(result)


def _costs(pair: Pair, student: PreTrainedModel, dtype: str) -> PassCosts:
    """Time the student's steps and the target's passes, as the engine runs them."""
    from sprinter.engine.pair import Pair as EnginePair
    from sprinter.models.pair import load_models
    from sprinter.theory.passes import measure_passes
    from sprinter.training.drafts.student import save_student

    models = pair.models
    assert models.tokenizer is not None
    with tempfile.TemporaryDirectory() as folder:
        save_student(student, models.tokenizer, Path(folder), models.target.eos_ids)  # type: ignore[arg-type]
        draft = load_models(folder, tokenizer=models.tokenizer, dtype=dtype).target
    return measure_passes(EnginePair(replace(models, draft=draft)))


def _show(result: dict[str, Any]) -> None:
    columns = ("shape", "parameters", "step ms", "β now", "β expected", "γ", "speed", "training s")
    rows = (
        (
            row["shape"], f"{row['parameters']:,}", f"{row['draft_step_s'] * 1e3:.2f}", f"{row['beta']:.3f}",
            f"{row['expected_beta']:.3f}", str(row["gamma"] or "–"), f"{row['expected_speed']:.2f}",
            f"{row['training_s']:.0f}",
        )
        for row in result["shapes"]
    )  # fmt: skip
    print_table(columns, rows, title=f"expected after {result['tokens']:,.0f} positions, exact decoding")
    fit = result["fit"]
    console().print(
        f"1 − β ∝ parameters^{fit['size']:.2f} · positions^{fit['tokens']:.2f}, fitted within {fit['error']:.3f} of β; "
        "speed is relative to plain decoding, for positions that are independent, without the loop's own time"
    )
    best = result["best"]
    console().print(
        f"shape {best} pays most" if best else "no shape pays: plain decoding is faster on this machine"
    )
