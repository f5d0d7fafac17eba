"""The ``kronfac`` command: its arguments and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kronfac.distributed.consistency import version
from kronfac.runs import output
from kronfac.runs.errors import UserError, of_a_file
from kronfac.train import commands
from kronfac.train.launch.group import LAUNCHED, LostGroupError, leave_at_once
from kronfac.train.launch.launch import FAILED, LOST, WRONG
from kronfac.train.run.resuming import DEFAULT

_EPILOG = """examples:
  kronfac train                              handwritten digits with K-FAC
  kronfac train cifar10 --optimizer sgd --epochs 3
  kronfac compare digits --optimizers sgd,kfac --seeds 3
  kronfac report runs/digits-compare
  torchrun --nproc-per-node 8 -m kronfac train cifar10
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    0 done, 1 the run failed, 2 wrong arguments or files, 129, 130 and 143 stopped by
    SIGHUP, Ctrl-C and SIGTERM, with a checkpoint.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    code = _run(arguments)
    leave_at_once(code)
    return code


def _run(arguments: list[str]) -> int:
    try:
        options = _parsed(arguments)
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _say(error, WRONG)
    except LostGroupError as error:
        return LOST if LAUNCHED in os.environ else _say(error, FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kronfac recipes | head`
        output.silence(sys.stdout)
        return 0
    except OSError as error:  # a path may be anything: too long, in a folder of somebody else, ...
        if output.is_of_output(error):
            output.silence(sys.stdout)
            return _say(UserError(f"{output.unwritable(error)}; send it elsewhere"), WRONG)
        return _say(of_a_file(error), WRONG)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments; help and version are printed and end the program."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:
        sys.stdout.flush()  # here, where an error becomes a sentence
        raise
    options.arguments = arguments
    return options


def _say(error: Exception, code: int) -> int:
    sentence = " ".join(str(error).split()).rstrip(".")
    end = "" if sentence.endswith(("?", "!")) else "."
    output.complain(f"{sentence}{end}")
    return code


class _Parser(argparse.ArgumentParser):
    """Errors in the words of the rest of the program."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Say what is wrong, in one sentence."""
        raise SystemExit(_say(UserError(f"{message}; see `{self.prog} --help`"), WRONG))


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[_Parser]


def _parser() -> _Parser:
    parser = _Parser(
        prog="kronfac",
        description="Train models with K-FAC and other optimizers, and look at what came out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = f"kronfac {version('kronfac')}"
    parser.add_argument("--version", action="version", version=about, help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _train(subparsers)
    _compare(subparsers)
    _report(subparsers)
    _recipes(subparsers)
    _data(subparsers)
    _plan(subparsers)
    return parser


def _train(subparsers: Commands) -> None:
    parser = subparsers.add_parser("train", help="run a recipe with one optimizer")
    _common(parser)
    parser.add_argument("--optimizer", metavar="NAME", help="a table of the recipe")
    parser.add_argument("--lr", type=float, metavar="X", help="learning rate of this optimizer")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of everything random")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; must not exist yet")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="resume a run folder; without DIR, the last run of this recipe, optimizer and seed",
    )
    parser.set_defaults(command=commands.train)


def _compare(subparsers: Commands) -> None:
    parser = subparsers.add_parser("compare", help="run a recipe with several optimizers and seeds")
    _common(parser)
    parser.add_argument(
        "--optimizers",
        metavar="A,B,...",
        help="tables of the recipe or methods, or `all` for every one of both; by default all tables "
        "whose packages are installed",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the runs; must not exist"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="resume such a folder")
    parser.add_argument("--no-report", action="store_true", help="write no report at the end")
    parser.set_defaults(command=commands.compare)


def _recipe(parser: argparse.ArgumentParser, about: str) -> None:
    """Which recipe, how it is changed, and where its data are."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=about)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change the recipe, for example train.clip=1.0 or optimizers.kfac.damping=1e-3",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data sets are")


def _common(parser: argparse.ArgumentParser) -> None:
    """What ``train`` and ``compare`` share."""
    _recipe(parser, f"name or .toml (default: {DEFAULT}, or that of the folder to resume)")
    parser.add_argument("--epochs", type=float, metavar="X", help="short for train.epochs")
    parser.add_argument("--batch", type=int, metavar="N", help="short for train.batch")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on this machine")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; a GPU if there is one")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="where run folders go (default: runs)"
    )
    parser.add_argument(
        "--stop-at-target",
        action=argparse.BooleanOptionalAction,
        help="end at the recipe's target, or do not",
    )
    parser.add_argument("--log", metavar="A,B", help="also log to tensorboard, wandb")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _report(subparsers: Commands) -> None:
    parser = subparsers.add_parser("report", help="write report.html and pictures of runs")
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="run or compare folders")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: the folder itself if it is one, else report",
    )
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    parser.set_defaults(command=commands.report)


def _recipes(subparsers: Commands) -> None:
    parser = subparsers.add_parser("recipes", help="list recipes, or print one")
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one")
    parser.set_defaults(command=commands.recipes)


def _data(subparsers: Commands) -> None:
    parser = subparsers.add_parser("data", help="list data sets, or fetch one")
    parser.add_argument("name", nargs="?", metavar="NAME", help="fetch this one")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where to")
    parser.set_defaults(command=commands.data)


def _plan(subparsers: Commands) -> None:
    parser = subparsers.add_parser("plan", help="predict what K-FAC costs on many ranks")
    _recipe(parser, f"name or .toml (default: {DEFAULT})")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--gbit", type=float, default=10.0, metavar="X", help="Gb/s between them (default: 10)"
    )
    parser.add_argument(
        "--latency", type=float, default=50.0, metavar="X", help="microseconds (default: 50)"
    )
    parser.set_defaults(command=commands.plan, recipe=DEFAULT)
