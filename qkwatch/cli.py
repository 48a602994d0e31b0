"""The command line: `qkwatch demo | report | inspect | bench`. Imports torch only when a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from qkwatch import __version__
from qkwatch.errors import QKWatchError

BENCHES = ("reading", "training", "patched", "find")
PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="qkwatch",
        description="Watch attention while a model trains, and patch it to QK-norm in place when it saturates.",
    )
    top.add_argument("--version", action="version", version=f"qkwatch {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="train a small GPT three times: see saturation, the warning, the patch")
    demo.add_argument("--quick", action="store_true", help="fewer steps: under a minute on two free cores")
    demo.add_argument("--logdir", default="qkwatch_demo", metavar="DIR", help="TensorBoard logs (%(default)s)")
    demo.add_argument("--json", metavar="FILE", help="also write the result there")
    demo.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")

    report = commands.add_parser("report", help="what qkwatch wrote into TensorBoard logs, as tables")
    report.add_argument("logdir", metavar="LOGDIR", help="a folder of TensorBoard logs; its subfolders are read too")

    inspect = commands.add_parser("inspect", help="which attention layers a checkpoint's weights carry a patch for")
    inspect.add_argument("checkpoint", metavar="CKPT", help="a Lightning checkpoint or a state_dict saved by torch")

    bench = commands.add_parser("bench", help="what watching and patching cost on this machine, as ratios")
    bench.add_argument("--only", choices=BENCHES, help="one of the comparisons")
    bench.add_argument("--json", metavar="FILE", help="also write the figures there")
    bench.add_argument("--rounds", type=int, metavar="N", help="pairs per comparison (default: its own)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, 1 after an error that is explained, 2 for wrong usage, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        _run(options)
        sys.stdout.flush()
    except QKWatchError as error:
        print(f"qkwatch {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `qkwatch report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.command == "demo":
        from dataclasses import replace

        from qkwatch.demo import QUICK, run
        from qkwatch.demo_model import Setup

        run(replace(QUICK if options.quick else Setup(), seed=options.seed), options.logdir, options.json)
    elif options.command == "report":
        from qkwatch.logs import print_report

        print_report(options.logdir)
    elif options.command == "inspect":
        from qkwatch.inspection import print_inspection

        print_inspection(options.checkpoint)
    else:
        from qkwatch.bench import run as run_bench

        run_bench(options.only, options.json, options.rounds)
