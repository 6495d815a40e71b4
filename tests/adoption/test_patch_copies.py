"""Copies of patched modules run normops, pickles contain only names and state, and threads do not interfere."""

import copy
import io
import multiprocessing
import pickle
import pickletools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import norms_of_others as others
import pytest
import torch
from alike import assert_alike
from norms_of_others import LlamaNorm
from torch import nn

import normops
from normops.adoption import installation
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
    assert not {"forward", "__setstate__"} & vars(module).keys()
    assert len(others.patch(module).already) == 1


# Kinds of modules.


class Reduced(LlamaNorm):
    def __reduce__(self) -> Any:
        return type(self), (SIZE,)


class ReducedWithTwoStates(LlamaNorm):
    def __reduce__(self) -> Any:
        return type(self), (SIZE,), (dict(self.__dict__), {"more": 1})

    def __setstate__(self, state: Any) -> None:
        for each in state:
            self.__dict__.update(each)


class ReducedByAnother(LlamaNorm):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (SIZE,), dict(self.__dict__)


class State(LlamaNorm):
    def __getstate__(self) -> Any:
        return self.variance_epsilon, self.weight.detach()

    def __setstate__(self, state: Any) -> None:
        nn.Module.__init__(self)
        self.variance_epsilon, self.weight = state[0], nn.Parameter(state[1])


class Stateful(LlamaNorm):
    def __getstate__(self) -> Any:
        return OrderedDict(vars(self))

    def __reduce__(self) -> Any:
        return _stateful, (dict(vars(self)),)


def _stateful(state: dict[str, Any]) -> Stateful:
    vars(norm := object.__new__(Stateful)).update(state)
    return norm


class Slotted(LlamaNorm):
    __slots__ = ("kept", "missing")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept = ["kept"]

    def __getstate__(self) -> Any:  # nn.Module's omits slots
        return dict(self.__dict__), {"kept": self.kept}, hasattr(self, "missing")

    def __setstate__(self, state: Any) -> None:
        own, slots, has_missing = state
        self.__dict__.update(own)
        self.kept = slots["kept"]
        assert not has_missing


class Hidden:
    """A container whose content only pickle and copy reach."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class WithItself(LlamaNorm):
    """Refers to itself in an attribute, a tuple, a container and a bound method."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.__dict__["attribute"] = self

    def __getstate__(self) -> Any:
        parts = (self, [self], Hidden(self))
        return {**self.__dict__, "parts": parts, "method": self.extra_repr}


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
KINDS = (*others.NORMS, Reduced, ReducedWithTwoStates, ReducedByAnother, State, Stateful, Slotted, WithItself)


@pytest.mark.parametrize("copied", [*COPIED.values(), *map(pickled, range(2, 6))], ids=[*COPIED, *"2345"])
@pytest.mark.parametrize("norm", KINDS, ids=lambda norm: norm.__name__)
@pytest.mark.covering(core=1)
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
    norm = patched(WithItself)
    again: Any = copied(norm)
    referred = norm if copied is copy.copy else again  # a shallow copy shares what the original refers to
    first, (second,), hidden = again.parts
    assert all(each is referred for each in (again.attribute, first, second, hidden.inner, again.method.__self__))


@pytest.mark.parametrize("norm", [SINGLETON, SINGLETONS["looked"]], ids=lambda norm: type(norm).__name__)
@every_copy
def test_module_that_is_its_own_copy_is_unchanged(norm: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    assert len(others.patch(norm).patched) == 1
    assert copied(norm) is norm
    assert normops.unpatch(norm) == 1


def test_model_that_shares_a_norm_shares_its_copy() -> None:
    model: Any = nn.ModuleList([norm := patched(WithItself), nn.Sequential(norm)])
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


class Interrupted(LlamaNorm):
    """Calls a function while it is copied, as if another thread ran."""

    interrupt: Callable[[], None] = staticmethod(lambda: None)

    def __getstate__(self) -> Any:
        self.interrupt()
        return dict(self.__dict__)


@every_copy
def test_unpatch_during_a_copy_leaves_the_copy_patched(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = patched(Interrupted)
    monkeypatch.setattr(Interrupted, "interrupt", staticmethod(lambda: unpatched.append(normops.unpatch(norm))))
    unpatched: list[int] = []
    assert_patched(copied(norm))  # as it was when copying began
    assert unpatched == [1]
    assert type(norm) is Interrupted


# Pickles.


class NamesAlone(pickle.Unpickler):
    """Allows two names of normops, and names of torch, the standard types and the norm's module."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module == "normops.adoption.installation" and name in {"_remake", "_options"}
        assert is_ours or module.partition(".")[0] in {"torch", "collections", "copyreg", LlamaNorm.__module__}, module
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


class Crafted:
    """Pickles like a patched norm, with another object instead of the rounding."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return installation._remake, (LlamaNorm, (SIZE,), self.made, False)


class CraftedClass:
    """Pickles like the object that gives a copy its class."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return installation._ClassOfCopies, self.arguments


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (("open(1)", "source"), ValueError, r"""rounding: expected "once" or "original", but got 'open\(1\)'"""),
        (CraftedClass(nn.Linear), TypeError, "made: expected a class of normops.patch, but got Linear"),
        (CraftedClass(Patched), TypeError, "made: expected a class of normops.patch, but got Patched"),
    ],
)
def test_crafted_pickle_raises(made: Any, error: type[Exception], message: str) -> None:
    assert_patched(pickle.loads(pickle.dumps(Crafted(("once", "source")))))
    with pytest.raises(error, match=message):
        pickle.loads(pickle.dumps(Crafted(made)))


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
        assert "__setstate__" not in vars(again)
    assert_patched(pickle.loads(data))  # the code is the same again


class StateSetter(LlamaNorm):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self),), dict(vars(self)), None, None, _set_by_itself


def _set_by_itself(module: Any, state: Any) -> None:
    vars(module).update(state)


def test_custom_state_setter_is_loaded_unpatched() -> None:
    norm = patched(StateSetter)
    with pytest.warns(UserWarning, match="a StateSetter was patched by normops when it was pickled"):
        again: Any = pickle.loads(pickle.dumps(norm))
    assert type(again) is StateSetter
    assert torch.equal(again.weight, norm.weight)


def test_patched_class_is_made_once() -> None:
    """A second request for a class, for example of another thread, returns the first class."""
    norm = patched()
    made: Made = norm.normops_made
    assert class_of(made) is type(norm) is type(patched()) is type(copy.deepcopy(norm))
