"""normops with unknown versions of torch, and the list of private parts of torch that it uses."""

import ast
import inspect
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from other_process import printed, python

import normops
from building.torch_headers import Torch
from normops import _private_torch
from normops._binding import find_binding

PACKAGE = Path(normops.__file__).parent
MINOR = ".".join(torch.__version__.split(".")[:2])


def private_uses(source: str) -> set[str]:
    """Returns imports from private parts of torch, and private attributes except for those of self and cls."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names = [f"{node.module}.{name.name}" for name in node.names]
            found |= {name for name in names if any(part.startswith("_") for part in name.split("."))}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found |= {node.attr} if re.match("_[^_]", node.attr) else set()
    return found


def test_the_list_of_private_parts_is_complete() -> None:
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.glob("**/*.py")}
    modules = {name: private_uses(path.read_text()) for path, name in names.items()}
    listed = {name: set(uses) for name, (_, uses) in _private_torch.USES.items()}
    assert {name: uses for name, uses in modules.items() if uses} == listed


def test_the_list_of_undocumented_parts_is_complete() -> None:
    listed = dict(_private_torch.UNDOCUMENTED)
    headers, csrc = set(listed.pop("csrc")), Path(inspect.getfile(Torch)).parent.parent / "csrc"
    included = set(re.findall(r"#include <(.*)>", "".join(path.read_text() for path in csrc.rglob("*.*"))))
    assert headers <= included
    assert {header for header in included if header.startswith("torch/csrc/")} <= headers
    sources = {str(path.relative_to(PACKAGE.parent)): path.read_text() for path in PACKAGE.glob("**/*.py")}
    assert [(path, part) for path, parts in listed.items() for part in parts if part not in sources[path]] == []
    uses_fx = {
        path for path, text in sources.items() if "symbolic_shapes" in text and path != "normops/_private_torch.py"
    }
    assert uses_fx <= set(listed)


def test_installed_torch_is_listed() -> None:
    assert MINOR in _private_torch.SEEN_IN


def test_newer_torch_causes_one_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for minor in _private_torch.SEEN_IN:
            _private_torch.warn_if_newer(f"{minor}.1+cpu")
    last = _private_torch.SEEN_IN[-1]
    with pytest.warns(RuntimeWarning) as caught:
        _private_torch.warn_if_newer("2.99.0.dev1")
    assert [str(warning.message) for warning in caught] == [
        f"expected torch 2.11 to {last}, with which normops was tested, but got torch 2.99.0.dev1: "
        "normops.override_torch in traced graphs, DTensor, nested tensors, normops.recompute_norms, normops.patch "
        "depend on private parts of torch and may not work; the rest should"
    ]


WITHOUT_A_NAME = """
import builtins, os, sys, warnings
import torch, torch.distributed.tensor, torch.nested._internal.ops, torch._inductor.compile_fx
import torch._inductor.custom_graph_pass, torch.distributed.tensor.experimental

def remove(name):
    # Only normops cannot import the name: a torch that moves it has changed its own imports.
    parent, _, last = name.rpartition(".")
    imported = builtins.__import__
    def without_name(module, globals=None, locals=None, fromlist=(), level=0):
        if module == parent and last in (fromlist or ()) and globals["__name__"].startswith("normops"):
            raise ImportError(f"cannot import name {last!r} from {parent!r}")
        return imported(module, globals, locals, fromlist, level)
    builtins.__import__ = without_name
    if parent == "torch.jit":
        delattr(torch.jit, last)

def use():
    x, gate = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4)
    y = normops.rms_norm(x, 4) + normops.RMSNorm(4)(x) + normops.GatedRMSNorm(4)(x, gate)
    y.sum().backward()
    assert torch.func.vmap(lambda row: normops.rms_norm(row, 4))(gate).shape == (2, 4)

def first_line(feature):
    try:
        feature()
    except ImportError as error:
        return str(error).partition(", but got")[0]
    return "works"

FEATURES = {
    "patch": lambda: normops.patch(torch.nn.Sequential(torch.nn.RMSNorm(4))),
    "recompute_norms": lambda: normops.recompute_norms().__enter__(),
}
for name in sys.argv[1:]:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        remove(name)
        with warnings.catch_warnings(record=True) as caught:
            import normops
        use()
        warned = [str(warning.message).partition(", which torch")[0] for warning in caught]
        print(name, warned, {name: first_line(feature) for name, feature in FEATURES.items()}, sep="; ", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
EAGER_FEATURES = ("DTensor", "nested tensors")


def test_missing_private_name_disables_only_its_features() -> None:
    """Removes each name in a new process: the warning, or the error on first use, names the feature."""
    imported: dict[str, set[str]] = {}
    for features, names in _private_torch.USES.values():
        for name in names:
            if "." in name:
                imported.setdefault(name, set()).update(features)
    imported["torch.jit.is_tracing"] = set()
    found = printed(WITHOUT_A_NAME, *imported).splitlines()
    for (name, using), line in zip(imported.items(), found, strict=True):
        of_name, warned, used = line.split("; ", 2)
        assert of_name == name
        assert ast.literal_eval(warned) == [
            f"normops works without {feature}" for feature in EAGER_FEATURES if feature in using
        ], line
        for short, outcome in ast.literal_eval(used).items():
            feature = f"normops.{short}"
            last = _private_torch.SEEN_IN[-1]
            expected = f"expected torch 2.11 to {last}, whose private parts {feature} uses"
            assert outcome == (expected if feature in using else "works"), line


def test_features_that_use_private_parts_are_imported_on_first_use() -> None:
    code = "import sys, normops; print([name for name in sys.modules if name.startswith('normops.')])"
    imported = ast.literal_eval(printed(code))
    for name in ("normops.adoption", "normops.recompute"):
        assert name not in imported
    assert set(normops._LAZY) <= {*dir(normops)} & {*normops.__all__}
    with pytest.raises(AttributeError, match="module 'normops' has no attribute 'pach'"):
        normops.pach  # noqa: B018


def copied_package(folder: Path) -> Path:
    return shutil.copytree(PACKAGE, folder / "normops", ignore=shutil.ignore_patterns("*.so", "torch-*", "__pycache__"))


def test_operators_work_with_a_newer_torch(tmp_path: Path) -> None:
    package = copied_package(tmp_path)
    for name, target in (("libnormops_kernels.so", "libnormops_kernels.so"), ("torch-2.99", f"torch-{MINOR}")):
        (package / name).symlink_to(PACKAGE / target)
    code = """
import torch, warnings
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as caught:
    import normops
print([warning.category.__name__ for warning in caught if "normops was tested" in str(warning.message)])
print(normops.rms_norm(torch.ones(2, 4), 4).sum().item())
"""
    warned, value = printed(code, cwd=tmp_path).splitlines()
    assert warned == "['RuntimeWarning']"
    assert float(value) == pytest.approx(8, abs=1e-5)


BUILD = (
    "build it for this one, in a folder with the sources of normops: "
    "pip install --no-build-isolation --no-deps --force-reinstall ."
)
LIBRARY = b"\x7fELF\2\1".ljust(64, b"\0")  # a header without a section table


def binding(package: Path, *files: str) -> Path:
    """Makes libraries without content, and those that each binding needs."""
    folders = [str(Path(file).parent) for file in files]
    for file in (*files, *(f"{folder}/libnormops.so" for folder in folders), "libnormops_kernels.so"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_bytes(LIBRARY)
    return package


MODULE = next(path.name for path in (PACKAGE / f"torch-{MINOR}").glob("_C.*"))


def test_the_binding_for_the_installed_torch_is_chosen(tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", f"torch-2.9/{MODULE}", f"torch-2.13/{MODULE}")
    assert find_binding(package, "2.13.1+cu130") == package / "torch-2.13"
    assert find_binding(package, "2.9.0") == package / "torch-2.9"
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+rocm7.2", "2.13.0+xpu"):
        assert find_binding(package, version) == package / "torch-2.13"


@pytest.mark.parametrize(
    "version", ["2.13.0a0+nv25.9", "2.13.0.dev20260101+cpu", "2.13.0rc1", "2.13.0+git1234567", "2.13.0+rocm7.0.2.git24"]
)
def test_pre_releases_and_vendor_builds_need_their_own_binding(tmp_path: Path, version: str) -> None:
    package = binding(tmp_path / "normops", f"torch-2.13/{MODULE}")
    with pytest.raises(ImportError) as caught:
        find_binding(package, version)
    assert str(caught.value) == (
        f"expected torch 2.13, which this normops was built for, but got torch {version}: {BUILD}"
    )
    folder = Torch(version, Path("/torch"), cuda=None).package_folder
    assert find_binding(binding(package, f"{folder}/{MODULE}"), version) == package / f"torch-{version}"


def test_unsupported_torch_raises_one_clear_sentence(tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", *(f"torch-2.{minor}/{MODULE}" for minor in (9, 12, 11)))
    with pytest.raises(ImportError) as caught:
        find_binding(package, "2.99.1")
    assert str(caught.value) == (
        f"expected torch 2.9, 2.11 or 2.12, which this normops was built for, but got torch 2.99.1: {BUILD}"
    )
    (tmp_path / "setup.py").touch()
    with pytest.raises(ImportError, match=f"2.99.1: build it: pip install .* --editable {tmp_path}$"):
        find_binding(package, "2.99.1")
    checkout = tmp_path / "a folder"
    (binding(checkout / "normops", f"torch-2.13/{MODULE}").parent / "setup.py").touch()
    with pytest.raises(ImportError, match=f"--editable '{checkout}'$"):
        find_binding(checkout / "normops", "2.99.1")


@pytest.mark.parametrize("module", ["_C.cpython-39-x86_64-linux-gnu.so", "no module _C"])  # the latter is no module
def test_folder_without_a_binding_for_this_python_raises_one_clear_sentence(module: str, tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", f"torch-2.13/{module}")
    with pytest.raises(ImportError, match=f"for this Python in .*/torch-2.13, but got {module}: build it for this one"):
        find_binding(package, "2.13.0")


LIBRARIES = ("libnormops_kernels.so", f"torch-{MINOR}/libnormops.so", f"torch-{MINOR}/{MODULE}")


def with_libraries(package: Path, changed: str, content: bytes | None) -> Path:
    """Links the libraries of the package; one of them has another content, or is missing."""
    (package / f"torch-{MINOR}").mkdir(parents=True)
    for library in LIBRARIES:
        if library != changed:
            (package / library).symlink_to(PACKAGE / library)
        elif content is not None:
            (package / library).write_bytes(content)
    return package


@pytest.mark.parametrize("library", LIBRARIES)
def test_truncated_libraries_raise_one_clear_sentence(library: str, tmp_path: Path) -> None:
    """Loading one would end the process."""
    whole = (PACKAGE / library).read_bytes()
    for size in (0, 40, 4096, len(whole) - 1):
        package = with_libraries(tmp_path / str(size), library, whole[:size])
        with pytest.raises(ImportError) as caught:
            find_binding(package, torch.__version__)
        assert str(caught.value) == (
            f"expected {package / library} to be a whole shared library, but got a file of {size} bytes, which is "
            f"truncated: {BUILD}"
        )
        assert caught.value.path == str(package / library)


IMPORTS = """
for _ in range(2):
    try:
        import normops
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize("content", [None, LIBRARY], ids=["missing", "of another kind"])
def test_each_import_that_cannot_load_a_library_says_the_same(content: bytes | None, tmp_path: Path) -> None:
    package = with_libraries(copied_package(tmp_path), "libnormops_kernels.so", content)
    first, second = printed(IMPORTS, cwd=tmp_path, PYTHONPATH="").splitlines()
    assert first == second
    missing = f"expected the library {package / 'libnormops_kernels.so'}, but got No such file or directory: build it"
    assert first.startswith(missing if content is None else "libnormops_kernels.so")


def test_unbuilt_checkout_raises_one_clear_sentence(tmp_path: Path) -> None:
    """Python that is started in a checkout imports the sources instead of the installed normops."""
    checkout = copied_package(tmp_path)
    (tmp_path / "setup.py").touch()
    result = python("-c", "import normops", cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: expected normops to be built, but {checkout} is its source code, which Python finds before any "
        "installed normops: start Python in another folder, or build it: "
        f"pip install --no-build-isolation --no-deps --editable {tmp_path}"
    )
