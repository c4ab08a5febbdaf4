"""The ``jax-hpc`` command: the parser, ``info``, and the rule for errors."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax_hpc
from jax_hpc import cli_generate

# What a user can cause: wrong arguments or files, a missing package, a device without memory or
# kernels. Anything else is a fault of this program and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 with one line on stderr."""
    arguments = _parser().parse_args(argv)
    _tolerate_any_text(sys.stdout)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", jax_hpc.FallbackWarning)
            warnings.showwarning = _show_warning
            arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (such as head) has enough; without this Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except _USER_ERRORS as error:
        if arguments.debug:
            raise
        print(f"jax-hpc: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """One line: where in the library a warning arose is of no use at a prompt."""
    kind = "note" if issubclass(category, jax_hpc.FallbackWarning) else category.__name__
    print(f"jax-hpc: {kind}: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("--json", action="store_true", help="print one JSON object, not text")
    parser = argparse.ArgumentParser(
        prog="jax-hpc", description="Mixture-of-Experts decoding in JAX, on Hopper kernels."
    )
    parser.add_argument("--version", action="version", version=jax_hpc.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info", parents=[common], help="versions, devices, and which operators have kernels here"
    )
    info.set_defaults(run=_info)
    cli_generate.add_command(commands, common)
    return parser


def _info(arguments: argparse.Namespace) -> None:
    facts = jax_hpc.info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    rows = {name: facts[name] for name in ("version", "jax", "jaxlib", "platform")}
    built = facts["extension"]
    rows["extension"] = built if isinstance(built, str) else _pairs(built)
    rows["devices"] = [_pairs(device) for device in facts["devices"]] or "no CUDA device"
    _print_rows(rows)
    print("\noperators")
    _print_rows(facts["operators"], indent="  ")


def _pairs(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _print_rows(rows: dict[str, Any], indent: str = "") -> None:
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{indent}{name:<{width}}  {line}")
            name = ""


def _one_line(error: BaseException) -> str:
    """The message without line breaks; compilers' and allocators' reports end with the first."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0] if isinstance(error, RuntimeError) else " ".join(map(str.strip, lines))
    return f"{type(error).__name__}: {text}" if isinstance(error, TypeError) else text


def _tolerate_any_text(stream: Any) -> None:
    """A terminal that cannot show a character shows a question mark; it does not end the run."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
