"""python -m normops run: programs run as they do without it, with torch's own rms_norm overridden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import divided

OVERRIDES = "('normops' in sys.modules and sys.modules['normops'].build_info()['overrides_torch'])"

PROGRAM = """
import atexit, os, pickle, sys

print(sys.argv, sys.path[0], os.getcwd())
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sorted(name for name in globals() if name.startswith("__")), sys.modules["__main__"].__dict__ is globals())

class Pickled:
    pass

atexit.register(lambda: print("at exit", type(pickle.loads(pickle.dumps(Pickled())))))

def fail():
    raise ValueError("failed")

match sys.argv[1:]:
    case ["fail"]:
        fail()
    case ["chain"]:
        try:
            fail()
        except ValueError as error:
            raise RuntimeError from error
    case ["exit"]:
        sys.exit(3)
    case ["words"]:
        sys.exit("words")
    case ["interrupt"]:
        raise KeyboardInterrupt
    case ["import"]:
        import beside
    case ["overrides"]:
        print(OVERRIDES)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    program = PROGRAM.replace("OVERRIDES", OVERRIDES)
    (folder / "package").mkdir()
    (folder / "application").mkdir()
    (folder / "program.py").write_text(program)
    (folder / "beside.py").write_text("print(__name__, __file__)")
    (folder / "wrong.py").write_text("def f(:")
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "other.py").touch()
    (folder / "package" / "module.py").write_text(f"from . import other\n{program}")
    (folder / "package" / "__main__.py").write_text(program)
    (folder / "package" / "link.py").symlink_to("../program.py")
    (folder / "application" / "__main__.py").write_text(program)
    return folder


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


PROGRAMS = (
    "program.py",
    "program.py fail",
    "program.py chain",
    "program.py exit",
    "program.py words",
    "program.py interrupt",
    "./program.py import",
    "program.py -m run --help",
    "package/link.py import",
    "wrong.py",
    "nowhere.py",
    "application import",
    "application fail",
    "-m package.module -m x",
    "-m package.module fail",
    "-m package words",
    "-m nowhere",
)
USUAL = ("program.py", "program.py chain", "./program.py import", "wrong.py", "application fail", "-m package words")


# Each in a process that imports torch.
@pytest.mark.parametrize("arguments", divided(PROGRAMS, USUAL[:1], USUAL))
def test_as_without(folder: Path, arguments: str) -> None:
    expected, actual = (run(folder, *prefix, *arguments.split()) for prefix in ((), ("-m", "normops", "run")))
    assert (actual.stdout, actual.stderr, actual.returncode) == (expected.stdout, expected.stderr, expected.returncode)


@pytest.mark.parametrize("arguments", ["program.py", "-m package.module", "-m package", "application"])
def test_torch_is_overridden(folder: Path, arguments: str) -> None:
    lines = run(folder, "-m", "normops", "run", *arguments.split(), "overrides").stdout.splitlines()
    assert lines[3] == "True"
    assert run(folder, *arguments.split(), "overrides").stdout.splitlines()[3] == "False"


def test_a_safe_path_stays_safe(folder: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    actual = run(folder, "-P", "-m", "normops", "run", "program.py", "import")
    assert actual.stderr.endswith("ModuleNotFoundError: No module named 'beside'\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run", "run: expected a program, or -m and a module"),
        ("run -m", "run: expected a program, or -m and a module"),
        ("run -x program.py", "run: expected a program, or -m and a module, but got -x"),
        ("program.py", "expected no argument, or run, but got program.py"),
    ],
)
def test_usage(folder: Path, arguments: str, said: str) -> None:
    actual = run(folder, "-m", "normops", *arguments.split())
    assert actual.returncode == 2
    assert actual.stderr.startswith("usage: python -m normops\n")
    assert actual.stderr.endswith(f"\n\n{said}\n")


def test_help(folder: Path) -> None:
    helped = run(folder, "-m", "normops", "--help")
    assert (helped.returncode, helped.stdout.splitlines()[0]) == (0, "usage: python -m normops")


CHILDREN = f"""
import multiprocessing, sys

class Pickled:
    pass

def child(pickled, queue):
    grandchild = __name__ == "__mp_main__" and pickled is not None
    if grandchild:
        start(None, queue)
    queue.put((type(pickled).__name__, {OVERRIDES}))

def start(pickled, queue):
    process = context.Process(target=child, args=(pickled, queue))
    process.start()
    process.join()
    assert process.exitcode == 0

context = multiprocessing.get_context(sys.argv[1])
if __name__ == "__main__":
    queue = context.SimpleQueue()
    start(Pickled(), queue)
    print(queue.get(), queue.get() if sys.argv[1] != "fork" else "")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.full
def test_children_are_as_their_parent_is(folder: Path, method: str) -> None:
    (folder / "children.py").write_text(CHILDREN)
    for prefix, is_overridden in ((("-m", "normops", "run"), True), ((), False)):
        actual = run(folder, *prefix, "children.py", method)
        expected = [("Pickled", is_overridden), ""]
        if method != "fork":
            expected = [("NoneType", is_overridden), ("Pickled", is_overridden)]
        assert (actual.stdout, actual.stderr) == (f"{expected[0]} {expected[1]}\n", "")


DISTRIBUTED = """
import sys, torch, torch.distributed as dist

dist.init_process_group("gloo")
norm = torch.nn.parallel.DistributedDataParallel(torch.nn.RMSNorm(8))
with torch.profiler.profile() as profile:
    norm(torch.randn(4, 8)).sum().backward()
ran = sorted({event.name for event in profile.events() if event.name.startswith("normops::")})
everything = [None, None]
dist.all_gather_object(everything, (dist.get_rank(), sys.argv[1:], ran))
if dist.get_rank() == 0:
    print(everything)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_under_torchrun(folder: Path) -> None:
    (folder / "distributed.py").write_text(DISTRIBUTED)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
    actual = run(folder, *torchrun, "-m", "normops", "run", "distributed.py", "--epochs", "3")
    ran = ["normops::rms_norm", "normops::rms_norm_backward"]
    assert actual.stdout == f"{[(rank, ['--epochs', '3'], ran) for rank in range(2)]}\n", actual.stderr


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel has been installed, of what has been built here."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built_with = {"CXX": os.environ["BUILT_WITH"]} if "BUILT_WITH" in os.environ else {}  # else all is compiled again
    subprocess.run(wheel, env=os.environ | built_with, check=True)
    (found,) = folder.glob("normops-*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(found)], check=True)
    return target


@pytest.mark.full
def test_importing_torch_runs_nothing_of_normops(site: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(site), "NORMOPS_OVERRIDE_TORCH": "1"}

    def imported(code: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-X", "importtime", "-c", code]
        return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, check=False)

    def modules(code: str) -> list[str]:
        lines = imported(code).stderr.splitlines()
        names = [line.rpartition("|")[2].strip() for line in lines]
        return [name for name in names if name.startswith("normops")]

    assert modules("import torch") == []
    assert "normops" in modules("import normops")
    where = imported("import normops; print(normops.__file__)").stdout
    assert where == f"{site / 'normops' / '__init__.py'}\n"
    # Half an uninstallation: the metadata are still there.
    for path in sorted((site / "normops").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert [path.name for path in site.glob("normops*")] != []
    done = imported("import torch; print(torch.ones(1).item())")
    assert (done.returncode, done.stdout) == (0, "1.0\n")
