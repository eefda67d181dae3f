# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, a report or an error out, and an exit code.

Each command imports its work when it runs: ``--help`` needs none of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from glm5_patch import __version__

if TYPE_CHECKING:
    from glm5_patch.errors import PatchError
    from glm5_patch.report import Report

# typer brings its own copy of click, or depends on it: this finds either's class
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="glm5-patch",
    help="Patch an installed vLLM so that it serves GLM-5 where stock vLLM cannot.",
    epilog="Exit codes: 0 done, or already so; 1 verification failed, or drifted; "
    "2 usage; 3 vLLM not found; 4 release not supported; 5 conflict; 6 not permitted, "
    "read-only or out of space; 7 busy.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="PATH", help="The interpreter that runs vLLM."),
]
SitePackages = Annotated[
    Path | None,
    typer.Option(
        "--site-packages", metavar="DIR", help="The folder that holds vllm-*.dist-info."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")
]


@app.command()
def apply(
    python: Python = None,
    site_packages: SitePackages = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this feature; can be repeated."),
    ] = None,
    allow_unlisted: Annotated[
        bool,
        typer.Option(
            "--allow-unlisted",
            help="Patch a build that is not known, if each hunk fits in one place.",
        ),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Patch vLLM; write nothing if it is patched already."""
    from glm5_patch import commands

    _run(
        "apply",
        json,
        quiet,
        lambda: commands.apply(
            commands.find(python, site_packages),
            commands.patch_set(),
            feature or (),
            dry_run,
            allow_unlisted,
        ),
    )


@app.command()
def verify(
    python: Python = None,
    site_packages: SitePackages = None,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="files|import|select|kernels",
            help="How deep to check; select, the deepest without a GPU, if not given.",
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check also that this GGUF file loads."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check what was applied, down to what the GPU computes."""
    from glm5_patch import commands

    _run(
        "verify",
        json,
        quiet,
        lambda: commands.verify(
            commands.find(python, site_packages), commands.patch_set(), level, gguf
        ),
    )


@app.command()
def revert(
    python: Python = None,
    site_packages: SitePackages = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give back the exact files that were installed."""
    from glm5_patch import commands

    _run(
        "revert",
        json,
        quiet,
        lambda: commands.revert(
            commands.find(python, site_packages), commands.patch_set, dry_run
        ),
    )


@app.command()
def status(
    python: Python = None,
    site_packages: SitePackages = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say whether vLLM is patched, and what changed since."""
    from glm5_patch import commands

    _run(
        "status",
        json,
        quiet,
        lambda: commands.status(
            commands.find(python, site_packages), commands.patch_set()
        ),
    )


@app.command()
def explain(
    python: Python = None,
    site_packages: SitePackages = None,
    capability: Annotated[
        list[str] | None,
        typer.Option(metavar="X.Y", help="A GPU's compute capability; repeatable."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="float16 or bfloat16; repeatable."),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="As vLLM takes it; repeatable."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say which attention backend each GPU gets, and why."""
    from glm5_patch import commands

    _run(
        "explain",
        json,
        quiet,
        lambda: commands.explain(
            commands.find(python, site_packages),
            commands.patch_set(),
            capability,
            dtype,
            kv_cache_dtype,
        ),
    )


@app.command()
def bench(
    python: Python = None,
    site_packages: SitePackages = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of the attention: float16 or bfloat16.")
    ] = "bfloat16",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check and time the kernels on this GPU; print a table."""
    from glm5_patch import commands

    _run(
        "bench",
        json,
        quiet,
        lambda: commands.bench(
            commands.find(python, site_packages), commands.patch_set(), dtype, quick
        ),
    )


@app.command()
def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A GGUF file; any of a split set.")
    ],
    python: Python = None,
    site_packages: SitePackages = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a GGUF file of GLM-5 holds and needs, and whether vLLM can load it."""
    from glm5_patch import commands

    _run("inspect", json, quiet, lambda: commands.inspect(file, python, site_packages))


@app.command("list")
def list_releases(json: Json = False, quiet: Quiet = False) -> None:
    """List the vLLM releases and the features that are known."""
    from glm5_patch import commands

    _run("list", json, quiet, lambda: commands.list_releases(commands.patch_set()))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Patch an installed vLLM so that it serves GLM-5 where stock vLLM cannot."""
    if show:
        typer.echo(f"glm5-patch {__version__}")
        raise typer.Exit


class _Unwritten(Exception):
    """Standard output does not take the report."""


def main() -> NoReturn:
    """The console script."""
    _open_missing_streams()
    try:
        try:
            code = app(standalone_mode=False)
            sys.stdout.flush()  # the help text, which is not ours to write
        except _UsageError as error:
            _end_with(error)
        except OSError as error:
            raise _Unwritten(error) from error
    except _Unwritten as error:
        from glm5_patch.errors import NotPermitted

        print(f"error: standard output cannot be written: {error}", file=sys.stderr)
        # Python flushes once more when it ends, and would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(NotPermitted.exit_code)
    sys.exit(code)


def _open_missing_streams() -> None:
    """Occupy closed standard descriptors: the next file opened would take their place.

    Writing to a closed stdout fails then, as it should; what goes to stderr is lost.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _say(write: Callable[[], None]) -> None:
    """Write to stdout, or raise ``_Unwritten``: nothing may end well unread."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        raise _Unwritten(error) from error


def _end_with(error: typer.BadParameter) -> NoReturn:
    from glm5_patch.errors import Usage

    if len(sys.argv) == 1:
        error.show()  # the help text
        sys.exit(Usage.exit_code)
    command = error.ctx.info_name if error.ctx and error.ctx.parent else None
    _fail(
        command,
        "--json" in sys.argv,
        Usage(
            error.format_message(),
            todo=f"see 'glm5-patch {f'{command} ' if command else ''}--help'",
        ),
    )


def _fail(command: str | None, json: bool, error: PatchError) -> NoReturn:
    print("\n".join(error.lines()), file=sys.stderr)
    if json:
        from glm5_patch import report

        _say(lambda: print(report.error_json(command, error)))
    sys.exit(error.exit_code)


def _run(name: str, json: bool, quiet: bool, work: Callable[[], Report]) -> NoReturn:
    from glm5_patch import report, tree
    from glm5_patch.errors import PatchError

    try:
        outcome = work()
    except PatchError as error:
        _fail(name, json, error)
    except OSError as error:
        _fail(name, json, tree.refused(error, Path("a temporary file")))
    if json:
        _say(lambda: print(report.as_json(outcome)))
    elif not quiet:
        _say(lambda: report.render(outcome, sys.stdout))
    elif outcome.exit_code:
        print(outcome.summary, file=sys.stderr)
    sys.exit(outcome.exit_code)
