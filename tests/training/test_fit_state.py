"""The history of a fit, and what it says of steps that were trained again."""

from __future__ import annotations

import dataclasses
import gc
import weakref

from psync.training.fit_state import FitState, History


def test_steps_that_were_trained_again_belong_to_the_last_epoch() -> None:
    history = History()
    history._add_repeated(3)  # there is none
    history._add(0, {"loss": 2.0})
    history._add(1, {"loss": 1.0}, repeated=4)
    history._add_repeated(3)
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 7])


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_them() -> None:
    history = History()
    history.restore_checkpoint_state({"epoch": [0, 1], "history": {"loss": [2.0, 1.0]}})
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 0])


def test_what_it_saves_is_restored() -> None:
    saved, restored = History([0], {"loss": [2.0]}, [5]), History()
    restored.restore_checkpoint_state(saved.checkpoint_state())
    assert restored == saved
    copied = restored._copy()
    copied._add(1, {"loss": 1.0})
    assert restored == saved
    restored._clear()
    assert restored == History()


def test_a_history_has_what_it_says_and_nothing_else() -> None:
    history = History([0], {"loss": [2.0]}, [5])
    assert dataclasses.asdict(history) == {
        "epoch": [0], "history": {"loss": [2.0]}, "repeated": [5], "stop_reason": None,
    }  # fmt: skip


def test_a_checkpoint_has_the_steps_that_are_owed_and_nothing_is_kept_alive_after_the_fit() -> None:
    class Counts:
        def owed(self) -> int:
            return 7

    counts, state = Counts(), FitState(History([0], {"loss": [2.0]}, [5]))
    assert state.checkpoint_state()["owed"] == 0
    state.begin(counts.owed)
    saved = state.checkpoint_state()
    assert saved == {**dataclasses.asdict(state.history), "owed": 7}
    state.close()
    known = weakref.ref(counts)
    del counts
    gc.collect()
    assert known() is None
    assert state.checkpoint_state() == saved
    restored = FitState(History())
    restored.restore_checkpoint_state(saved)
    assert (restored.history, restored.before) == (state.history, 7)
    restored.clear()
    assert (restored.history, restored.before) == (History(), 0)
