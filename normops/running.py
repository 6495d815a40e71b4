"""``python -m normops run``: a program that is not yours to change, with normops under torch's own rms_norm.

The program finds what Python gives it: its arguments in ``sys.argv``, itself as ``__main__``, its folder in
``sys.path``; it ends as it would, and its tracebacks begin with it. Processes that it starts with multiprocessing run
like it.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from runpy import _run_module_as_main  # type: ignore[attr-defined]  # what python -m and python folder call
from types import ModuleType, TracebackType
from typing import Any

from normops.adoption import set_override_torch

USAGE = """usage: python -m normops
       python -m normops run program.py [arguments]
       python -m normops run -m module [arguments]

Without arguments: checks this installation.
run: runs a program with normops under torch.nn.functional.rms_norm and torch.nn.RMSNorm."""


def run(arguments: Sequence[str]) -> None:
    """Runs ``program.py [arguments]`` or ``-m module [arguments]`` with torch overridden."""
    has_module = arguments[:1] == ["-m"]
    program, *others = arguments[has_module:] or [""]
    if not program or (program.startswith("-") and not has_module):
        got = f", but got {program}" if program else ""
        print(f"{USAGE}\n\nrun: expected a program, or -m and a module{got}", file=sys.stderr)
        sys.exit(2)
    set_override_torch(True)
    _override_in_children()
    sys.argv = ["-m" if has_module else program, *others]
    _become(program, _run_module if has_module else _script(program))


def _become(program: str, run_program: Callable[[str, ModuleType], None]) -> None:
    """Runs the program as ``__main__``, which it remains: threads, exit handlers and pickles outlive it."""
    before, main = sys.modules["__main__"], ModuleType("__main__")
    if "__annotations__" in vars(before):  # up to Python 3.13
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        run_program(program, main)
    except BaseException as error:
        _hide_frames(error)
        raise


def _run_module(name: str, main: ModuleType) -> None:
    _run_module_as_main(name)


def _script(program: str) -> Callable[[str, ModuleType], None]:
    is_file = pkgutil.get_importer(program) is None
    folder = os.path.dirname(os.path.realpath(program)) if is_file else os.path.abspath(program)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # in the place of that of python -m
    elif not is_file:
        sys.path.insert(0, folder)
    return _run_file if is_file else _run_folder


def _run_folder(path: str, main: ModuleType) -> None:
    _run_module_as_main("__main__", alter_argv=False)


def _run_file(path: str, main: ModuleType) -> None:
    file = os.path.join(os.getcwd(), path)  # as Python, not normalized
    loader = SourceFileLoader("__main__", file)
    main.__dict__.update(__builtins__=sys.modules["builtins"], __file__=file, __cached__=None, __loader__=loader)
    exec(_code_of(file), main.__dict__)


def _code_of(file: str) -> Any:
    try:
        with open(file, "rb") as stream:
            if (code := pkgutil.read_code(stream)) is not None:
                return code
        with open(file, "rb") as stream:
            return compile(stream.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _hide_frames(error: BaseException) -> None:
    """If nobody catches the error, what is printed of it begins with the program."""
    printed = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is error:
            for is_ours in (False, True):
                while traceback is not None and (traceback.tb_frame.f_code.co_filename == __file__) == is_ours:
                    traceback = traceback.tb_next
            raised = raised.with_traceback(traceback)
        printed(kind, raised, traceback)

    sys.excepthook = hook


class _Override:
    """Whoever unpickles it overrides torch."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return override_children, ()


def override_children() -> None:
    """What a child does before it imports the program: as its parent has."""
    set_override_torch(True)
    _override_in_children()


def _override_in_children() -> None:
    """Children of the methods spawn and forkserver start anew; those of fork are as their parent is."""
    prepare = spawn.get_preparation_data

    def prepare_and_override(name: str) -> dict[str, Any]:
        return {**prepare(name), "normops": _Override()}

    spawn.get_preparation_data = prepare_and_override
