"""The list of rules: each has a way to be broken, a page, and a level that its findings keep to."""

from pathlib import Path

import pytest

from raggedatlas.formats.cxg import RULES
from raggedatlas.formats.cxg.rules import rules_page
from raggedatlas.testing.cxg_faults import DAMAGES

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
LEVELS = ("must", "should", "practice")

NUMBERS = [*range(8), *range(10, 33), *range(40, 46), *range(50, 54), 60, 61, 70, 71]


def test_ids_are_stable() -> None:
    """Rules are C00 to C71, in order, and none is missing."""
    assert list(RULES) == [f"C{number:02d}" for number in NUMBERS]


def test_every_rule_has_a_damage() -> None:
    """There is a way to break each rule and no other, none for a rule that does not exist, and none is worse than its rule."""
    assert {damage.rule for damage in DAMAGES} == set(RULES)
    assert {damage.rule for damage in DAMAGES if not damage.also} == set(RULES)
    for damage in DAMAGES:
        assert LEVELS.index(damage.level) >= LEVELS.index(RULES[damage.rule].level), damage
    worst = {rule: min(LEVELS.index(d.level) for d in DAMAGES if d.rule == rule) for rule in RULES}
    assert {rule: LEVELS[at] for rule, at in worst.items()} == {rule.id: rule.level for rule in RULES.values()}


def test_the_page_is_that_of_the_rules() -> None:
    """docs/reference/cxg-rules.md is what `rules_page` makes of the rules; write it again after a change."""
    assert (ROOT / "docs" / "reference" / "cxg-rules.md").read_text("utf-8") == rules_page()


def test_rules_and_mends_are_sentences() -> None:
    """Each rule says what holds, and the way out."""
    for rule in RULES.values():
        assert rule.sentence.endswith(".")
        assert rule.fix.endswith(".")
