"""How much of a prompt a step takes in."""

from __future__ import annotations

from rollout_worker.engines.hf.prefill_pace import LEAST_PREFILL, MOST_PREFILL, PrefillPace


def settled(pace: PrefillPace, overhead: float, per_token: float, todo: int = 10**6) -> int:
    """Let a device with these costs run for a while; return the budget."""
    for _ in range(50):
        pace.note_pass(overhead, 0)
        fed = min(todo, pace.prefill_budget())
        pace.note_pass(overhead + fed * per_token, fed)
    return pace.prefill_budget()


def test_a_step_with_newcomers_lasts_about_twice_as_long() -> None:
    slow = settled(PrefillPace(0, 4096), overhead=0.5, per_token=0.002)
    assert 125 <= slow <= 500  # 0.25 s to 1 s on top of 0.5 s
    quick = settled(PrefillPace(0, 256), overhead=0.005, per_token=0.00002)
    assert 2000 <= quick <= MOST_PREFILL  # up to 0.1 s on top of 5 ms


def test_bounds_hold_and_short_prompts_teach_nothing() -> None:
    assert settled(PrefillPace(0, 256), 0.01, 1.0) == LEAST_PREFILL
    assert settled(PrefillPace(0, 256), 0.001, 1e-9) == MOST_PREFILL
    assert settled(PrefillPace(0, 256), 0.001, 1e-9, todo=10) == 256
    assert settled(PrefillPace(7, 256), 0.001, 1e-9) == 7
