"""Options of the process: override_torch and set_backend act when called, and restore as with blocks."""

import gc

import pytest

import normops
from normops._switch import Option, Setting


def overrides() -> bool:
    return normops.build_info()["overrides_torch"]


class Recorded:
    """An option that records each value that is applied."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.option = Option(self.applied.append, "initial")

    def set(self, value: str) -> Setting[str]:
        return Setting(self.option, value)

    @property
    def value(self) -> str:
        return self.option._entries[-1].value


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_calls_act_at_once_and_last() -> None:
    for enabled in (True, False, True, False):
        normops.override_torch(enabled)
        gc.collect()  # dropped settings restore nothing
        assert overrides() == enabled


def test_the_latest_open_block_decides(recorded: Recorded) -> None:
    first, second, third = map(recorded.set, ("first", "second", "third"))
    with first:
        second.__enter__()
        third.__enter__()
        assert recorded.value == "third"
        second.__exit__(None, None, None)
        assert recorded.value == "third"
        third.__exit__(None, None, None)
        assert recorded.value == "first"
    assert recorded.value == "initial"


def test_a_call_inside_a_block_ends_with_it(recorded: Recorded) -> None:
    recorded.set("before")
    with recorded.set("outer"):
        recorded.set("call")
        assert recorded.value == "call"
        with recorded.set("inner"):
            recorded.set("another")
            assert recorded.value == "another"
        assert recorded.value == "call"
    assert recorded.value == "before"
    with recorded.set("outer") as nothing:
        kept = recorded.set("kept")
    assert nothing is None
    assert recorded.value == "before"
    with kept:
        assert recorded.value == "kept"
    assert recorded.value == "before"


def test_a_call_before_another_enters_its_block(recorded: Recorded) -> None:
    """Two threads may both call before either enters; each block restores the value before both calls."""
    first, second = recorded.set("first"), recorded.set("second")
    with first, second:
        assert recorded.value == "second"
    assert recorded.value == "initial"
    kept = recorded.set("kept")
    recorded.set("final")
    with kept:
        assert recorded.value == "kept"
    assert recorded.value == "final"


def test_one_setting_may_be_entered_again(recorded: Recorded) -> None:
    setting = recorded.set("set")
    for _ in range(2):
        with setting, recorded.set("other"), setting:
            assert recorded.value == "set"
        assert recorded.value == "initial"


def test_exceptions_leave_the_block(recorded: Recorded) -> None:
    with pytest.raises(ZeroDivisionError), recorded.set("set"):
        raise ZeroDivisionError
    assert recorded.value == "initial"


def test_a_value_that_cannot_be_applied_changes_nothing() -> None:
    def apply(value: int) -> None:
        if value < 0:
            raise ValueError(value)

    option = Option(apply, 1)
    with Setting(option, 2):
        with pytest.raises(ValueError, match="-3"):
            Setting(option, -3)
        assert option._entries[-1].value == 2
    assert option._entries[-1].value == 1


def test_decorated_functions_are_blocks() -> None:
    @normops.override_torch()
    def depth(levels: int) -> list[bool]:
        return [overrides(), *(depth(levels - 1) if levels else [])]

    assert not overrides()
    assert depth(2) == [True] * 3
    assert not overrides()


def test_many_calls_keep_few_entries(recorded: Recorded) -> None:
    for i in range(100):
        recorded.set(str(i))
    with recorded.set("outer"):
        for i in range(100):
            recorded.set(str(i))
        assert len(recorded.option._entries) < 6
    assert len(recorded.option._entries) < 3


def test_only_changes_of_the_state_reset_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    resets: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(overrides()))
    normops.override_torch(False)
    assert resets == []
    with normops.override_torch(), normops.override_torch():
        assert resets == [True]
        with normops.override_torch(False):
            assert resets == [True, False]
        assert resets == [True, False, True]
    assert resets == [True, False, True, False]
