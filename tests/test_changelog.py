"""The version, the changelog and the contract of the operators move together."""

import re
from pathlib import Path

import yaml

import pt2mx
from pt2mx.ops.contract import OPERATORS

TEXT = (Path(__file__).parent.parent / "CHANGELOG.md").read_text("utf-8")
PARTS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
RELEASES = [part for part in PARTS if not part.startswith("[Unreleased]\n")]


def test_the_newest_release_is_the_version():
    assert RELEASES[0].startswith(f"[{pt2mx.__version__}] - ")


def test_releases_descend():
    versions = [tuple(map(int, re.match(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d\n", r).groups())) for r in RELEASES]
    assert versions == sorted(versions, reverse=True) and len(set(versions)) == len(versions)


def test_the_changelog_names_the_version_of_each_operator():
    """The newest release names all, and what comes after it those that it changed."""
    unreleased = PARTS[: PARTS.index(RELEASES[0])]
    texts = re.findall(r"### Operators\n\n(.*?)\n(?:\n|$)", "".join([RELEASES[0], *unreleased]), flags=re.DOTALL)
    versions = {name: int(version) for text in texts for name, version in re.findall(r"`(\w+)`\s+(\d+)", text)}
    assert versions == {name: operator.version for name, operator in OPERATORS.items()}


def test_the_citation_names_the_newest_release():
    citation = yaml.safe_load((Path(__file__).parent.parent / "CITATION.cff").read_text("utf-8"))
    assert RELEASES[0].startswith(f"[{citation['version']}] - {citation['date-released']}")
