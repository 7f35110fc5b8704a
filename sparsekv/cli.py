"""The command line. A command is a row of the table below: its options are the fields of a stage's config, its work one
function of that stage. No logic lives here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import signal
import sys
import tempfile
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from sparsekv.util.disk import FAILS, disk_error
from sparsekv.util.errors import Interrupted, SparseKVError, first_line, printable
from sparsekv.util.progress import hide, progress
from sparsekv.util.ranks import Ranks

NOTHING = "nothing was finished; run the same command again"
RESUME = "what is finished is kept; the same command goes on with --resume (without --overwrite)"


class Command(NamedTuple):
    """Where a command's config and function live; the module is imported when the command is asked for.
    interrupted: how to go on after Ctrl-C or SIGTERM. needs: modules of extras, refused at once where they are not
    installed."""

    help: str
    module: str
    config: str
    run: str
    interrupted: str = NOTHING
    needs: tuple[str, ...] = ()


class StandardOutput:
    """Standard output, whose failure is an error of its own. What it cannot encode is written as escapes. A pipe that
    is read no more ends the command silently."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        hide()
        try:
            return int(self._written(self._stream.write, text) or 0)
        except UnicodeEncodeError:
            shown = text.encode(self._stream.encoding or "ascii", "backslashreplace").decode(self._stream.encoding)
            return int(self._written(self._stream.write, shown) or 0)

    def flush(self) -> None:
        self._written(self._stream.flush)

    def _written(self, work: Callable[..., Any], *words: str) -> Any:
        try:
            return work(*words)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._stream = open(os.devnull, "w", encoding="utf-8")  # at exit nothing is written again
            raise SparseKVError(f"could not write to standard output ({error.strerror or error}); give it a place that "
                                "has room") from error


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. No KeyboardInterrupt, which typer would answer with silence."""

    def __init__(self, signal: int, advice: str = NOTHING):
        self.signal, self.advice = signal, advice


TRAINING = ("lightning", "matplotlib")
COMMANDS = {
    "capture": Command(
        "Run the frozen model over a corpus and store its queries, keys, values and attention statistics.",
        "sparsekv.capture.run", "CaptureConfig", "run_capture",
        "finished documents are kept; the same command goes on (without --overwrite)"),
    "train-router": Command(
        "Train a router on a capture: buckets of keys by k-means, and the basis of their sketches.",
        "sparsekv.trainers.router", "RouterConfig", "train_router", RESUME, TRAINING),
    "train-phi": Command(
        "Train positive feature maps on a capture: they estimate the attention that is not read.",
        "sparsekv.trainers.phi", "PhiConfig", "train_phi", RESUME, TRAINING),
    "train": Command(
        "Capture, router, feature maps and their page in one command, with an estimate before it starts.",
        "sparsekv.trainers.pipeline", "TrainConfig", "run_train",
        "what is finished is kept; the same command goes on (without --overwrite)", TRAINING),
    "generate": Command(
        "Generate text from a prompt, decoding sparsely with trained artifacts or an untrained selector.",
        "sparsekv.runtime.hf.generate", "GenerateConfig", "generate"),
    "eval": Command(
        "Measure quality per byte read: tasks, selectors and budgets, with a report.",
        "sparsekv.evaluation.run", "EvalConfig", "run_eval", RESUME, ("matplotlib",)),
    "eval diagnostics": Command(
        "What every head does on captured held-out text: errors by method, entropy, mass, router recall; figures.",
        "sparsekv.evaluation.diagnose", "DiagnosticsConfig", "run_diagnostics", needs=("matplotlib",)),
    "push": Command(
        "Push an artifact, or the artifacts of a training, to the Hugging Face hub.",
        "sparsekv.artifacts.hub.push", "PushConfig", "push_artifact"),
    "inspect": Command(
        "Say what a capture store or an artifact is, how good it is, and on what it was trained.",
        "sparsekv.artifacts.inspection", "InspectConfig", "inspect_path"),
    "doctor": Command(
        "Say what this machine can run, and what installs the rest.",
        "sparsekv.util.doctor", "DoctorConfig", "run_doctor"),
    "demo": Command(
        "Capture, train and decode on a small real model, in minutes on two CPU cores; writes report.html.",
        "sparsekv.evaluation.demo", "DemoConfig", "run_demo",
        "run the same command with --overwrite to start again", TRAINING),
}


class LazyGroup(TyperGroup):
    """Imports a stage only to run its command or print its help, never to list it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        row = COMMANDS.get(cmd_name)
        return None if row is None else _as_click(cmd_name, row.help, lambda: None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = 2 if " ".join(args[:2]) in COMMANDS else 1
        name = " ".join(args[:words])
        row = COMMANDS.get(name)
        if row is None:
            return super().resolve_command(ctx, args)
        return name, _as_click(name, row.help, _command_function(row)), args[words:]


def _version(wanted: bool) -> None:
    if wanted:
        from sparsekv import __version__

        typer.echo(f"sparsekv {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train routers and feature maps offline; decode long contexts reading a few percent of the KV cache.",
)


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also after a command).")]
    = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]
    = False,
) -> None:
    pass


def _as_click(name: str, help: str, function: Callable[..., None]) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    single.command(name, help=help)(function)
    return typer.main.get_command(single)


def shown_options(config_type: Any) -> list[Any]:
    """The fields that are options of the command line: those without a heading first."""
    return sorted((f for f in dataclasses.fields(config_type) if f.init and f.metadata["flag"] is not None),
                  key=lambda f: f.metadata["typer"].get("rich_help_panel") is not None)


def _command_function(row: Command) -> Callable[..., None]:
    """A function with one keyword a config field, as typer reads it."""
    module = importlib.import_module(row.module)
    config_type = getattr(module, row.config)
    hints = typing.get_type_hints(config_type)
    parameters = []
    for field in shown_options(config_type):
        default: Any = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        kind = field.metadata["flag"]
        kind = hints[field.name] if kind is ... else kind | None if default is None else kind
        metadata = dict(field.metadata.get("typer", {}))
        declare = typer.Argument if metadata.pop("argument", False) else typer.Option
        shown = default is not inspect.Parameter.empty and default is not None
        about = field.metadata.get("help", "")
        names, about = metadata.pop("names", ()), _escape(about() if callable(about) else about)  # [tokens]: no tag
        info = declare(*names, help=about, show_default=shown, **metadata)
        parameters.append(inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info],
            default=default))

    def command(**options: Any) -> None:
        for name in row.needs:
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        try:
            result = getattr(module, row.run)(config_type(**options))
        except Stopped as stopped:
            raise Stopped(stopped.signal, row.interrupted) from None
        except OSError as error:
            if error.errno not in FAILS:
                raise
            where = error.filename or error.filename2 or options.get("output") or tempfile.gettempdir()
            raise disk_error(error, where, "read or write") from error
        except EOFError as error:
            raise SparseKVError(f"a file ended too early: {error}; it is damaged, write it again") from error
        summary = getattr(result, "summary", None)
        if callable(summary) and Ranks.first:
            typer.echo(printable(summary()))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def main() -> None:
    """Entry point: an error is one line on standard error and exit status 1, after Ctrl-C 130 and after SIGTERM 143;
    `--debug` shows its traceback."""
    debug = "--debug" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--debug"]
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    out = sys.stdout
    if out is not None:
        sys.stdout = StandardOutput(out)
    try:
        try:
            with _shown(sys.argv[1:]):
                app()
        finally:
            if out is not None:
                sys.stdout.flush()
    except Stopped as stopped:
        _fail(f"interrupted: {stopped.advice}", 128 + stopped.signal)
    except Interrupted as error:
        _fail(str(error), 128 + error.signal)
    except SparseKVError as error:
        if debug:
            raise
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if debug or not error.name:
            raise
        from sparsekv.util.doctor import install

        module = error.name.partition(".")[0]
        _fail(f"this needs the package {module}, which is not installed: run `{install(module)}`", 1)
    except Exception as error:
        if debug:
            raise
        if _out_of_memory(error):
            _fail(f"memory ran out ({first_line(error)[:200]}); ask for smaller sizes, or use a machine with more of "
                  "it", 1)
        _fail(f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)", 1)
    finally:
        sys.stdout = out
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(words: list[str]) -> contextlib.AbstractContextManager[Any]:
    """A command moves on standard error from its first second on, whatever it does."""
    works = words and words[0] in COMMANDS and not {"--help", "--version"} & set(words)
    return progress(f"sparsekv {words[0]}") if works else contextlib.nullcontext()


def _out_of_memory(error: Exception) -> bool:
    """torch says so of a CPU's memory by a RuntimeError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def _stop(number: int, _: Any) -> None:
    raise Stopped(number)


def _fail(message: str, status: int) -> typing.NoReturn:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {_escape(printable(message))}")
    raise SystemExit(status)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
