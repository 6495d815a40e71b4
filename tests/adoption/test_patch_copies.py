"""Copies of patched modules run normops, pickles contain only names and state, and threads do not interfere."""

import copy
import io
import multiprocessing
import pickle
import pickletools
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import norms_of_others as others
import pytest
import torch
from alike import assert_alike
from norms_of_others import LlamaNorm
from sampling import marked
from torch import nn

import normops
from normops.adoption.patched_class import Made, Patched, class_of

SIZE = 32
ROUNDS = 60


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def patched(norm: Callable[[int], nn.Module] = LlamaNorm) -> Any:
    module = norm(SIZE)
    assert len(others.patch(module, strict=True).patched) == 1
    return module


def pickled(protocol: int) -> Callable[[nn.Module], nn.Module]:
    return lambda module: pickle.loads(pickle.dumps(module, protocol))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickled(pickle.DEFAULT_PROTOCOL),
    "torch.save": saved,
}
every_copy = pytest.mark.parametrize("copied", COPIED.values(), ids=COPIED)


def assert_patched(module: nn.Module) -> None:
    assert isinstance(module, Patched)
    assert "forward" not in vars(module)
    assert len(others.patch(module).already) == 1


class Hidden:
    """A container whose content only pickle and copy reach."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def with_itself() -> Any:
    """Returns a norm that refers to itself in an attribute, a tuple, a container and a bound method."""
    norm = LlamaNorm(SIZE)
    vars(norm).update(attribute=norm, parts=(norm, [norm], Hidden(norm)), method=norm.extra_repr)
    assert len(others.patch(norm, strict=True).patched) == 1
    return norm


@pytest.mark.parametrize(
    "copied", [*COPIED.values(), *marked(pytest.mark.full, map(pickled, range(2, 6)))], ids=[*COPIED, *"2345"]
)
@pytest.mark.parametrize("norm", others.NORMS, ids=lambda norm: norm.__name__)
def test_copies_are_patched_and_independent(
    norm: Callable[[int], nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    original, module = norm(SIZE), patched(norm)
    own, x = dict(vars(module)), torch.randn(5, 2, SIZE)
    again, expected = copied(module), copied(original)
    assert_patched(again)
    assert type(again).__name__ == type(original).__name__
    assert isinstance(again, type(original))
    assert vars(again).keys() == vars(expected).keys()
    assert_alike(again(x), expected(x), "copied")
    # The copy has its own weight, unless a copy of the original shares the weight, too.
    with torch.no_grad():
        for parameter in (*again.parameters(), *expected.parameters()):
            parameter.zero_()
    assert_alike(again(x), expected(x), "written")
    assert_alike(module(x), original(x), "the first one")
    assert [(name, id(value)) for name, value in vars(module).items()] == [(name, id(own[name])) for name in own]
    assert normops.unpatch(again) == 1
    assert type(again) is type(original)


@every_copy
def test_copies_of_copies_of_models(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, original = others.model(), others.model()
    others.patch(model)
    again = copied(copy.deepcopy(copied(model)))
    assert len(others.patch(again).already) == 4
    x = torch.randn(4, SIZE)
    assert_alike(again(x), original(x), "copied")


@every_copy
def test_references_to_itself_become_references_to_the_copy(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = with_itself()
    again: Any = copied(norm)
    referred = norm if copied is copy.copy else again  # a shallow copy shares what the original refers to
    first, (second,), hidden = again.parts
    assert all(each is referred for each in (again.attribute, first, second, hidden.inner, again.method.__self__))


def _defining(name: str, value: Any) -> nn.Module:
    return type("Custom", (LlamaNorm,), {name: value})(SIZE)


@pytest.mark.parametrize(
    "norm",
    [
        _defining("__reduce__", lambda self: "SINGLETON"),
        _defining("__getstate__", lambda self: dict(vars(self))),
        _defining("__setstate__", lambda self, state: None),
        _defining("__deepcopy__", lambda self, memo: self),
        _defining("__slots__", ("kept",)),
    ],
    ids=lambda norm: [name for name in vars(type(norm)) if name.startswith("__")][-1],
)
def test_class_that_customizes_copying_is_skipped(norm: nn.Module) -> None:
    report = normops.patch(norm, by="measurement")
    assert [*report.skipped.values()] == [
        "Custom: its class customizes copying or pickling, or has slots; write normops.rms_norm into its forward"
    ]


def test_model_that_shares_a_norm_shares_its_copy() -> None:
    model: Any = nn.ModuleList([norm := with_itself(), nn.Sequential(norm)])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again[0] is again[1][0] is again[0].attribute
        assert_patched(again[0])


def test_copy_of_the_dictionary_keeps_the_given_class() -> None:
    norm, x = patched(), torch.randn(2, SIZE)
    for cls in (LlamaNorm, type(norm)):
        again: Any = object.__new__(cls)
        vars(again).update(vars(norm), _parameters={"weight": nn.Parameter(torch.full((SIZE,), 3.0))})
        assert isinstance(again, Patched) == (cls is not LlamaNorm)
        torch.testing.assert_close(again(x), LlamaNorm.forward(again, x))
    assert_patched(norm)


def test_replicas_of_data_parallel_have_their_own_weight() -> None:
    """Imitates ``torch.nn.parallel.replicate``, which requires GPUs: parameters become plain attributes."""
    norm, x = patched(), torch.randn(2, SIZE)
    replica = norm._replicate_for_data_parallel()
    replica._parameters = {}
    replica.weight = torch.full((SIZE,), 3.0)
    torch.testing.assert_close(replica(x), 3.0 * norm(x))
    assert isinstance(replica, Patched)


def test_to_empty_keeps_the_patch() -> None:
    norm = patched().to("meta").to_empty(device="cpu")
    norm.load_state_dict({"weight": torch.full((SIZE,), 3.0)})
    assert_patched(norm)
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(norm(x), LlamaNorm.forward(norm, x))


def hooked(x: torch.Tensor) -> torch.Tensor:
    return x


@every_copy
def test_forward_stored_by_a_hook_is_that_of_the_copy(copied: Callable[[nn.Module], nn.Module]) -> None:
    """accelerate stores the forward in ``_old_forward``."""
    norm = patched()
    norm._old_forward, norm.forward = norm.forward, hooked
    again: Any = copied(norm)
    assert again._old_forward.__self__ is (norm if copied is copy.copy else again)
    assert again._old_forward.__func__ is norm._old_forward.__func__
    assert again.forward is hooked
    assert len(others.patch(again).already) == 1


# Threads and processes.


def run_in_threads(*functions: Callable[[], None]) -> None:
    """Runs each function in a thread, and raises the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def repeated(function: Callable[[], object], rounds: int = ROUNDS) -> Callable[[], None]:
    def run() -> None:
        for _ in range(rounds):
            function()

    return run


@every_copy
@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_copy_and_call_one_module(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm, x = patched(), torch.randn(2, SIZE)
    own, expected = [(name, id(value)) for name, value in vars(norm).items()], norm(x)

    def call() -> None:
        assert torch.equal(norm(x), expected)
        assert [(name, id(value)) for name, value in vars(norm).items()] == own
        assert [*norm.state_dict()] == ["weight"]

    run_in_threads(*[repeated(lambda: assert_patched(copied(norm)))] * 3, repeated(call))
    assert_patched(norm)
    assert normops.unpatch(norm) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_module_that_is_patched_while_it_is_copied(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``copy`` looks for ``__deepcopy__``, which a module without the patch lacks, and later for ``__reduce_ex__``."""
    norm: Any = with_itself()
    monkeypatch.delattr(Patched, f"__{copied.__name__}__")
    again: Any = copied(norm)
    assert_patched(again)
    assert again is not norm
    assert again.method.__self__ is again.attribute is (norm if copied is copy.copy else again)
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(again(x), LlamaNorm.forward(norm, x))


# torch.save raises PicklingError if the class of an object changes while it is pickled.
@pytest.mark.parametrize("name", ["copy", "deepcopy", "pickle"])
@pytest.mark.usefixtures("frequent_switches")
def test_patching_and_unpatching_during_copies(name: str) -> None:
    copied = COPIED[name]
    norm, x = LlamaNorm(SIZE), torch.randn(2, SIZE)
    expected = norm(x)

    def change() -> None:
        assert len(others.patch(norm).patched) == 1
        assert normops.unpatch(norm) == 1

    def copy_it() -> None:
        torch.testing.assert_close(copied(norm)(x), expected)

    run_in_threads(repeated(copy_it), repeated(copy_it), repeated(change, ROUNDS // 3))
    assert type(norm) is LlamaNorm


def send_whether_patched(norm: nn.Module, pipe: Connection) -> None:
    """Runs in another process."""
    torch.set_num_threads(1)
    try:
        assert_patched(norm)
        assert_patched(copy.deepcopy(norm))
        assert normops.unpatch(norm) == 1
        pipe.send("patched")
    except BaseException as error:
        pipe.send(repr(error))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
@pytest.mark.parametrize(("method", "processes"), [("fork", 12), pytest.param("spawn", 1, marks=pytest.mark.full)])
def test_processes_started_during_copies_get_patched_modules(method: Any, processes: int) -> None:
    norm = patched()
    context: Any = multiprocessing.get_context(method)
    is_done = threading.Event()

    def copy_it() -> None:
        while not is_done.is_set():
            copy.copy(norm)

    def start() -> None:
        try:
            for _ in range(processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=send_whether_patched, args=(norm, theirs))
                process.start()
                assert ours.poll(60)
                assert ours.recv() == "patched"
                process.join()
        finally:
            is_done.set()

    run_in_threads(copy_it, copy_it, start)
    assert normops.unpatch(norm) == 1


# Pickles.


class NamesAlone(pickle.Unpickler):
    """Allows one name of normops, and names of torch, the standard types and the norm's module."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = module.partition(".")[0] in {"torch", "collections", LlamaNorm.__module__}
        names = {"normops.adoption.installation": "new_of", "builtins": "getattr"}
        assert is_known or name == names.get(module), (module, name)
        return super().find_class(module, name)


def test_pickle_contains_only_names_and_state() -> None:
    data = pickle.dumps(patched())
    strings = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert all(part.isidentifier() for text in strings for part in text.split(".")), strings
    assert_patched(NamesAlone(io.BytesIO(data)).load())


def test_weights_only_load_rejects_a_patched_module() -> None:
    file = io.BytesIO()
    torch.save(patched(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch.load(file, weights_only=True)


def test_crafted_pickle_raises() -> None:
    data = pickle.dumps(patched())
    assert_patched(pickle.loads(data))
    with pytest.raises(ValueError, match=r"""rounding: expected "once" or "original", but got 'open'"""):
        pickle.loads(data.replace(b"once", b"open"))


def test_pickle_is_loaded_unpatched_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a process with another version of the norm's library."""
    norm, x = patched(), torch.randn(2, SIZE)
    data = pickle.dumps(norm)
    with monkeypatch.context() as other_code:
        other_code.setattr(LlamaNorm, "forward", lambda self, hidden_states: 2 * hidden_states)
        title = "a LlamaNorm was patched by normops when it was pickled, and is loaded unpatched"
        with pytest.warns(UserWarning, match=title) as warned:
            again = pickle.loads(data)
        assert warned[0].filename == __file__
        assert torch.equal(again(x), 2 * x)
        assert type(again) is LlamaNorm
    assert_patched(pickle.loads(data))  # the code is the same again


def test_patched_class_is_made_once() -> None:
    """A second request for a class, for example of another thread, returns the first class."""
    norm = patched()
    made: Made = norm.normops_made
    assert class_of(made) is type(norm) is type(patched()) is type(copy.deepcopy(norm))
