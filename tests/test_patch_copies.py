"""Copying and pickling patched modules: threads and processes that copy one module do not interfere."""

import copy
import io
import multiprocessing
import pickle
import pickletools
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from norms_of_others import LlamaNorm
from torch import nn

import normops
from normops.adoption import guards, installation

SIZE = 32
ROUNDS = 60


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def patched(norm: Callable[[int], nn.Module] = LlamaNorm) -> Any:
    module = norm(SIZE)
    assert len(normops.patch(module, strict=True).patched) == 1
    return module


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
}
every_copy = pytest.mark.parametrize("copied", COPIED.values(), ids=COPIED)


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


def assert_patched(module: nn.Module) -> None:
    forward = vars(module).get("forward")
    assert isinstance(forward, MethodType)
    assert forward.__self__ is module
    assert vars(module)["__reduce_ex__"].__self__ is module
    assert len(normops.patch(module).already) == 1


def assert_same_attributes(module: nn.Module, own: dict[str, Any], before: list[tuple[str, Any]]) -> None:
    """Asserts that a module has the same dictionary as before, with the same objects in the same order."""
    assert vars(module) is own
    assert [(name, id(value)) for name, value in own.items()] == [(name, id(value)) for name, value in before]


@every_copy
def test_threads_that_copy_one_module_get_patched_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched()
    own, before = vars(norm), [*vars(norm).items()]
    run_in_threads(*[repeated(lambda: assert_patched(copied(norm)))] * 4)
    assert_same_attributes(norm, own, before)
    assert_patched(norm)
    assert normops.unpatch(norm) == 1


@every_copy
def test_the_original_is_patched_at_every_moment(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched()
    own, before = vars(norm), [*vars(norm).items()]

    def read() -> None:
        assert_same_attributes(norm, own, before)
        assert_patched(norm)

    run_in_threads(repeated(lambda: copied(norm)), repeated(lambda: copied(norm)), repeated(read, 20 * ROUNDS))


@every_copy
def test_attributes_set_and_deleted_during_copies_stay_so(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched()
    before = [*vars(norm).items()]

    def change() -> None:
        norm.label = label = [0]
        assert norm.label is label
        del norm.label
        assert not hasattr(norm, "label")
        norm.variance_epsilon = 1e-5
        assert norm.variance_epsilon == 1e-5

    run_in_threads(*[repeated(lambda: assert_patched(copied(norm)))] * 2, repeated(change, 20 * ROUNDS))
    assert [name for name, _ in before] == [*vars(norm)]
    assert vars(norm)["variance_epsilon"] == 1e-5
    assert normops.unpatch(norm) == 1


@every_copy
def test_calls_and_state_dicts_during_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched()
    own, before = vars(norm), [*vars(norm).items()]
    weight, function = norm.weight, vars(norm)["forward"].__func__
    x = torch.randn(2, SIZE)
    expected = norm(x)

    def call() -> None:
        assert torch.equal(norm(x), expected)
        assert norm.forward.__func__ is function

    def load() -> None:
        state = norm.state_dict()
        assert [*state] == ["weight"]
        assert norm.load_state_dict(state).missing_keys == []
        assert next(norm.parameters()) is weight

    run_in_threads(repeated(lambda: assert_patched(copied(norm))), repeated(call), repeated(load))
    assert_same_attributes(norm, own, before)


@every_copy
def test_patching_and_unpatching_during_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = LlamaNorm(SIZE)

    def change() -> None:
        assert len(normops.patch(norm).patched) == 1
        assert normops.unpatch(norm) == 1

    def copy_it() -> None:
        """A copy is patched or not; it never refers to the forward of the module that it was copied from."""
        forward = vars(copied(norm)).get("forward")
        assert forward is None or forward.__self__ is not norm

    run_in_threads(repeated(copy_it), repeated(copy_it), repeated(change, ROUNDS // 3))
    assert not {"forward", "__reduce_ex__"} & vars(norm).keys()


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


class Interrupted(LlamaNorm):
    """Calls a function while it is copied, as another thread may run then."""

    interrupt: Callable[[], None] = staticmethod(lambda: None)

    def __getstate__(self) -> Any:
        self.interrupt()
        return dict(self.__dict__)


@every_copy
def test_a_module_is_unchanged_while_it_is_copied(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = patched(Interrupted)
    own, before = vars(norm), [*vars(norm).items()]
    calls: list[None] = []

    def look() -> None:
        calls.append(None)
        assert_same_attributes(norm, own, before)
        assert_patched(norm)

    monkeypatch.setattr(Interrupted, "interrupt", staticmethod(look))
    assert_patched(copied(norm))
    assert calls


@every_copy
def test_changes_made_during_a_copy_persist(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = patched(Interrupted)
    norm.label = "label"
    unpatched: list[int] = []

    def change() -> None:
        del norm.label
        norm.variance_epsilon = 1e-5
        unpatched.append(normops.unpatch(norm))

    monkeypatch.setattr(Interrupted, "interrupt", staticmethod(change))
    again: Any = copied(norm)
    assert unpatched == [1]
    assert not {"label", "forward", "__reduce_ex__"} & vars(norm).keys()
    assert norm.variance_epsilon == 1e-5
    # The copy is that of the moment when copying began.
    assert_patched(again)
    assert (again.label, again.variance_epsilon) == ("label", 1e-6)


class Slotted(LlamaNorm):
    __slots__ = ("kept", "missing")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept = ["kept"]

    def __getstate__(self) -> Any:  # that of nn.Module leaves slots out
        return dict(self.__dict__), {"kept": self.kept}, hasattr(self, "missing")

    def __setstate__(self, state: Any) -> None:
        own, slots, has_missing = state
        self.__dict__.update(own)
        self.kept = slots["kept"]
        assert not has_missing


class WithItself(LlamaNorm):
    """Its state refers to the module itself, in an attribute, in a tuple, and by a method."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.__dict__["attribute"] = self

    def __getstate__(self) -> Any:
        return {**self.__dict__, "parts": (self, [self], {"self": self}), "method": self.extra_repr}


class Hidden:
    """A container that only pickle and copy know how to look into."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class HiddenItself(LlamaNorm):
    def __getstate__(self) -> Any:
        return {**self.__dict__, "hidden": Hidden(self)}


class Singleton(LlamaNorm):
    """Copied and pickled by name: each copy is the module itself."""

    def __reduce__(self) -> Any:
        return "SINGLETON"


class Looked(LlamaNorm):
    """Copied by a function that returns the module itself."""

    def __reduce__(self) -> Any:
        return _looked_up, ()


def _looked_up() -> Any:
    return SINGLETONS["looked"]


SINGLETON = Singleton(SIZE)
SINGLETONS: dict[str, Any] = {"looked": Looked(SIZE)}


@every_copy
def test_copies_have_the_slots_of_the_original(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched(Slotted)
    again: Any = copied(norm)
    assert_patched(again)
    assert again.kept == ["kept"]
    assert (again.kept is norm.kept) == (copied is copy.copy)


@every_copy
def test_references_to_itself_become_references_to_the_copy(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched(WithItself)
    own, before = vars(norm), [*vars(norm).items()]
    again: Any = copied(norm)
    assert_patched(again)
    referred = norm if copied is copy.copy else again  # a shallow copy shares what the original refers to
    first, (second,), third = again.parts
    assert all(each is referred for each in (again.attribute, first, second, third["self"], again.method.__self__))
    assert_same_attributes(norm, own, before)


@every_copy
def test_hidden_references_to_itself(copied: Callable[[nn.Module], nn.Module]) -> None:
    norm = patched(HiddenItself)
    again: Any = copied(norm)
    assert_patched(again)
    if copied is copy.copy:  # shares its parts with the original
        assert again.hidden.inner.weight is norm.weight
    else:
        assert again.hidden.inner is again


@pytest.mark.parametrize("norm", [SINGLETON, SINGLETONS["looked"]], ids=lambda norm: type(norm).__name__)
@every_copy
def test_a_module_that_is_its_own_copy_is_unchanged(norm: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    assert len(normops.patch(norm).patched) == 1
    own, before = vars(norm), [*vars(norm).items()]
    assert copied(norm) is norm
    assert_same_attributes(norm, own, before)
    assert normops.unpatch(norm) == 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_model_that_shares_a_norm_shares_its_copy(protocol: int) -> None:
    norm = patched(WithItself)
    model: Any = nn.ModuleList([norm, nn.Sequential(norm)])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model, protocol))):
        assert again[0] is again[1][0] is again[0].attribute
        assert_patched(again[0])


class NamesAlone(pickle.Unpickler):
    """Finds two names of normops, and those of torch, the standard types, and the norm's own module."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module == "normops.adoption.installation" and name in {"_remake", "Pickled"}
        assert is_ours or module.partition(".")[0] in {"torch", "collections", "copyreg", LlamaNorm.__module__}, module
        return super().find_class(module, name)


def test_a_pickle_has_names_and_state_alone() -> None:
    data = pickle.dumps(patched())
    strings = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert all(part.isidentifier() for text in strings for part in text.split(".")), strings
    assert_patched(NamesAlone(io.BytesIO(data)).load())


def test_a_load_of_weights_refuses_a_patched_module() -> None:
    file = io.BytesIO()
    torch.save(patched(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch.load(file, weights_only=True)


class Crafted:
    """Pickled as a patched norm, with something else in the place of what it is made of, or of an attribute."""

    def __init__(self, made_of: Any, slot: Any = "forward") -> None:
        self.reduced = installation._remake, (LlamaNorm, (SIZE,), {made_of: slot}, False)

    def __reduce__(self) -> Any:
        return self.reduced


def test_a_crafted_pickle_is_an_error() -> None:
    once, other = installation.Pickled("once"), installation.Pickled("open(1)")  # type: ignore[arg-type]
    assert_patched(pickle.loads(pickle.dumps(Crafted(once))))
    with pytest.raises(ValueError, match=r"""rounding: expected "once" or "original", but got 'open\(1\)'"""):
        pickle.loads(pickle.dumps(Crafted(other)))
    with pytest.raises(ValueError, match="slot: expected one of _old_forward, forward, but got '__class__'"):
        pickle.loads(pickle.dumps(Crafted(once, slot="__class__")))


class CraftedNorm:
    """Pickled as what a copy passes on, with an expression of its own to be compared."""

    def __init__(self, norm: Any, file: Path) -> None:
        self.norm = norm._replace(guards=(guards.Guard(f"open({str(file)!r}, 'w')", None),))

    def __reduce__(self) -> Any:
        return installation.Installed, (LlamaNorm, self.norm, "once")


def test_what_a_crafted_pickle_compares_is_not_evaluated(tmp_path: Path) -> None:
    ((made_of, _),) = installation.installed(patched()).items()
    crafted: Any = pickle.loads(pickle.dumps(Crafted(CraftedNorm(made_of.norm, tmp_path / "written"))))
    assert_patched(crafted)
    crafted(torch.ones(2, SIZE))
    assert not (tmp_path / "written").exists()


def test_a_reason_not_to_patch_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(patched())
    with monkeypatch.context() as other_code:
        other_code.setattr(LlamaNorm, "forward", lambda self, hidden_states: torch.rand(2))
        with pytest.warns(UserWarning, match="is loaded unpatched") as warned:
            pickle.loads(data)
    assert warned[0].filename == __file__
    assert_patched(pickle.loads(data))


class StateSetter(LlamaNorm):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self),), dict(vars(self)), None, None, _set_by_itself


def _set_by_itself(module: Any, state: Any) -> None:
    vars(module).update(state)


def test_a_state_that_is_set_in_another_way() -> None:
    norm = patched(StateSetter)
    with pytest.warns(UserWarning, match="a StateSetter was patched by normops when it was pickled"):
        again: Any = pickle.loads(pickle.dumps(norm))
    assert "__setstate__" not in vars(again)
    assert torch.equal(again.weight, norm.weight)


@every_copy
def test_a_forward_that_a_hook_calls_is_patched_again(copied: Callable[[nn.Module], nn.Module]) -> None:
    """As accelerate keeps it."""
    norm = patched()
    norm._old_forward, norm.forward = norm.forward, hooked
    again: Any = copied(norm)
    assert again._old_forward.__self__ is again
    assert again._old_forward.__func__ is norm._old_forward.__func__
    assert again.forward is hooked
    assert len(normops.patch(again).already) == 1


def hooked(x: torch.Tensor) -> torch.Tensor:
    return x
