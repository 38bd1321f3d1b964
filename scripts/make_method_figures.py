"""Draw the figures of docs/methods, one a rule, from the rules themselves.

Every curve, box and dot comes out of the classes in ``sprinter.decode``: laws and keep chances from the accept rules,
decisions and states from the trust and stop rules, texts from the real loop on a small pair of random laws. Nothing is
measured on a model. The same code gives the same files; needs matplotlib (the development extra).

    python scripts/make_method_figures.py                 # all, into docs/methods/figures
    python scripts/make_method_figures.py --only svip     # one
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch

import figures_accept  # noqa: F401 (registers its drawings)
import figures_engines  # noqa: F401
import figures_stop  # noqa: F401
import figures_trees  # noqa: F401
import figures_trust  # noqa: F401
from figures_base import FIGURES, FOLDER, STYLE, save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", choices=sorted(FIGURES), help="one figure instead of all")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for the PNG files (default: %(default)s)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    for name in [given.only] if given.only else FIGURES:
        fig = FIGURES[name]()
        path = given.out / f"{name}.png"
        save(fig, path)
        print(f"{name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
