"""What becomes of a torch that normops does not know, and the list of the private parts of torch that it uses."""

import ast
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from other_process import printed, python

import normops
from normops import _private_torch
from normops._binding import find_binding

PACKAGE = Path(normops.__file__).parent
MINOR = ".".join(torch.__version__.split(".")[:2])


def private_uses(source: str) -> set[str]:
    """What is imported from private parts of torch, and the private attributes of anything but self and our modules."""
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


def test_the_torch_that_is_tested_is_listed() -> None:
    assert MINOR in _private_torch.SEEN_IN


def test_a_newer_torch_is_warned_of_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for minor in _private_torch.SEEN_IN:
            _private_torch.warn_if_newer(f"{minor}.1+cpu")
    last = _private_torch.SEEN_IN[-1]
    with pytest.warns(RuntimeWarning) as caught:
        _private_torch.warn_if_newer("2.99.0.dev1")
    assert [str(warning.message) for warning in caught] == [
        f"expected torch 2.11 to {last}, with which normops was tested, but got torch 2.99.0.dev1: the rules of vmap, "
        "DTensor, nested tensors, normops.inductor_options, normops.patch, normops.recompute_norms rest on private "
        "parts of torch and may not work; the rest should"
    ]


def test_without_a_private_part_the_rest_works() -> None:
    code = """
import torch, warnings
import torch.nested._internal.ops as module
del module.register_jagged_func
with warnings.catch_warnings(record=True) as caught:
    import normops
print([str(warning.message).split(" (")[0] for warning in caught])
print(normops.rms_norm(torch.ones(2, 4), 4).sum().item())
"""
    warned, value = printed(code).splitlines()
    assert "expected to import normops.nested after torch.nested._internal.ops, but got ImportError" in warned
    assert float(value) == pytest.approx(8, abs=1e-5)


def copied_package(folder: Path) -> Path:
    return shutil.copytree(PACKAGE, folder / "normops", ignore=shutil.ignore_patterns("*.so", "torch-*", "__pycache__"))


def test_on_a_newer_torch_the_rest_works(tmp_path: Path) -> None:
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


def binding(package: Path, *files: str) -> Path:
    for file in files:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).touch()
    return package


MODULE = next(path.name for path in (PACKAGE / f"torch-{MINOR}").glob("_C.*"))


def test_the_binding_for_the_installed_torch_is_chosen(tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", f"torch-2.9/{MODULE}", f"torch-2.13/{MODULE}")
    assert find_binding(package, "2.13.1+cu130") == package / "torch-2.13"
    assert find_binding(package, "2.9.0") == package / "torch-2.9"


def test_another_torch_is_one_clear_sentence(tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", *(f"torch-2.{minor}/{MODULE}" for minor in (9, 12, 11)))
    with pytest.raises(ImportError) as caught:
        find_binding(package, "2.99.1")
    assert str(caught.value) == (
        "expected torch 2.9, 2.11 or 2.12, which this normops was built for, but got torch 2.99.1: build it for this "
        "one, in a folder with the sources of normops: "
        "pip install --no-build-isolation --no-deps --force-reinstall ."
    )
    (tmp_path / "setup.py").touch()
    with pytest.raises(ImportError, match=f"2.99.1: build it: pip install .* --editable {tmp_path}$"):
        find_binding(package, "2.99.1")


def test_another_python_is_one_clear_sentence(tmp_path: Path) -> None:
    package = binding(tmp_path / "normops", "torch-2.13/_C.cpython-39-x86_64-linux-gnu.so")
    with pytest.raises(ImportError, match=r"for this Python in .*/torch-2.13, but got _C.cpython-39-.*: build"):
        find_binding(package, "2.13.0")


def test_an_unbuilt_checkout_is_one_clear_sentence(tmp_path: Path) -> None:
    """What Python finds when it is started in a checkout whose normops was installed elsewhere."""
    checkout = copied_package(tmp_path)
    (tmp_path / "setup.py").touch()
    result = python("-c", "import normops", cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: expected normops to be built, but {checkout} is its source code, which Python finds before any "
        "installed normops: start Python in another folder, or build it: "
        f"pip install --no-build-isolation --no-deps --editable {tmp_path}"
    )


def test_an_installed_normops_is_checked_before_it_is_loaded() -> None:
    result = python("-c", "import torch; torch.__version__ = '2.99.1'; import normops")
    assert "which this normops was built for, but got torch 2.99.1: " in result.stderr
