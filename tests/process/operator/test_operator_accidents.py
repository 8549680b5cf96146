"""Stories of a pool, with an accident at each act of the operator: all end as they should, and nothing wrong happens.

Every day each accident happens once in every second story; `--soak` lets each happen at every act of all.
docs/faults.md has the table, which `--update-goldens` writes.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from tests.support.faults.accidents import ACCIDENTS, BY_NAME, play_story
from tests.support.faults.scenes import Story
from tests.support.faults.stories import STORIES

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"

PAIRS = 100
"""Two accidents at random acts, in each story."""

of_each_story = pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)


@of_each_story
def test_a_story_ends_well_whatever_happens_at_one_act(story: Story) -> None:
    acts, problems = play_story(story)
    assert problems == []
    for name in list(BY_NAME)[STORIES.index(story) % 2 :: 2]:
        at = zlib.crc32(f"{story.name} {name}".encode()) % len(acts) + 1
        assert play_story(story, {at: name})[1] == [], f"{name} at {at}: {acts[at - 1]}"


@pytest.mark.soak  # test_a_story_ends_well_whatever_happens_at_one_act has one act of each every day
@pytest.mark.parametrize("family", ACCIDENTS)
@of_each_story
def test_a_story_ends_well_whatever_happens_at_any_act(story: Story, family: str) -> None:
    acts, _ = play_story(story)
    found = {}
    for name in ACCIDENTS[family]:
        for at, what in enumerate(acts, 1):
            if problems := play_story(story, {at: name})[1]:
                found[f"{name} at {at}: {what}"] = problems
    assert found == {}


@pytest.mark.soak  # test_a_story_ends_well_whatever_happens_at_one_act has one accident at a time every day
@of_each_story
def test_a_story_ends_well_whatever_happens_twice(story: Story) -> None:
    count = len(play_story(story)[0])
    found = {}
    for seed in range(PAIRS):
        chosen = random.Random(f"{story.name} {seed}")
        plan = {at: chosen.choice(list(BY_NAME)) for at in chosen.sample(range(1, count + 1), 2)}
        if problems := play_story(story, plan)[1]:
            found[str(plan)] = problems
    assert found == {}


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = before + BEGIN + _table() + END + after
    if request.config.getoption("--update-goldens"):
        PAGE.write_text(text)
    assert text == PAGE.read_text(), "run pytest --update-goldens and review the difference"


def _table() -> str:
    lines = [
        f"| story | acts | {' | '.join(ACCIDENTS)} |",
        f"|---|{'---:|' * (len(ACCIDENTS) + 1)}",
    ]
    counts = {story.name: len(play_story(story)[0]) for story in STORIES}
    for name, count in (*counts.items(), ("all", sum(counts.values()))):
        runs = (str(count * len(names)) for names in ACCIDENTS.values())
        lines.append(f"| {name} | {count} | {' | '.join(runs)} |")
    return "\n".join(["", *lines, "", ""])
