"""The history of a fit, and what it says of steps that were trained again."""

from __future__ import annotations

from psync.training.fit_state import History


def test_steps_that_were_trained_again_belong_to_the_last_epoch() -> None:
    history = History()
    history.add_repeated(3)  # there is none
    history.add(0, {"loss": 2.0})
    history.add(1, {"loss": 1.0}, repeated=4)
    history.add_repeated(3)
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 7])


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_them() -> None:
    history = History()
    history.restore_checkpoint_state({"epoch": [0, 1], "history": {"loss": [2.0, 1.0]}})
    assert history == History([0, 1], {"loss": [2.0, 1.0]}, [0, 0])


def test_what_it_saves_is_restored() -> None:
    saved, restored = History([0], {"loss": [2.0]}, [5]), History()
    restored.restore_checkpoint_state(saved.checkpoint_state())
    assert restored == saved
    copied = restored.copy()
    copied.add(1, {"loss": 1.0})
    assert restored == saved
    restored.clear()
    assert restored == History()
