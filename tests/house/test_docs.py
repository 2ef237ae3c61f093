"""The pages of docs/ as a site, checked without building it; `ci/run.py docs` builds it strictly."""

import importlib
import re
from pathlib import Path

import pytest

import slapo_zoo
from slapo_zoo.language.directive import PRIMITIVES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
DIRECTIVE = re.compile(r"^::: (slapo_zoo\S+)$", re.MULTILINE)


def page_name(page):
    return page.relative_to(DOCS).as_posix()


def text_of(page):
    """Return a page without its code, in which brackets are no links."""
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def documented():
    """Map the names in the directives of the API reference to their objects."""
    found = {}
    for page in (DOCS / "reference").glob("*.md"):
        for path in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found[path] = resolve(path)
    return found


def resolve(path):
    """Return the object of a dotted path; the module is its longest importable prefix."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            thing = getattr(thing, name)
        return thing
    raise AssertionError(f"the reference names {path}, which is not there")


def test_every_docs_page_is_listed_in_the_menu_of_the_site():
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [page_name(page) for page in PAGES]


def test_site_is_dark_exactly_when_the_system_makes_its_pictures_dark():
    schemes = re.findall(r"\(prefers-color-scheme: (\w+)\)", (ROOT / "mkdocs.yml").read_text())
    assert schemes == ["light", "dark"]
    pictures = list((DOCS / "pictures").glob("*.svg"))
    assert len(pictures) >= 8
    assert all("(prefers-color-scheme: dark)" in picture.read_text() for picture in pictures)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_in_docs_pages_lead_to_existing_pages_of_the_site(page):
    for target, anchor in LINK.findall(text_of(page)):
        place = (page.parent / target).resolve() if target else page
        assert place.is_file(), f"{page_name(page)} points at {target}"
        assert place.is_relative_to(DOCS), f"{target} is not part of the site: give its name only"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{page_name(page)} points at {target}#{anchor}"


def test_api_reference_page_lists_every_public_name():
    found = [id(thing) for thing in documented().values()]
    found.append(id(slapo_zoo.verify))  # a callable package: its function is documented
    missing = [n for n in slapo_zoo.__all__ if id(getattr(slapo_zoo, n)) not in found]
    assert missing == []


def test_api_reference_page_lists_every_schedule_primitive():
    found = {id(thing) for thing in documented().values()}
    ours = [
        c for c in PRIMITIVES.values() if c.__module__.startswith("slapo_zoo.language.primitives.")
    ]
    assert [c.name for c in ours if id(c) not in found] == []


def test_architecture_page_lists_every_sharding_rule():
    rules = importlib.import_module("slapo_zoo.zoo.rules")
    ours = {
        name
        for name, thing in vars(rules).items()
        if name[0] != "_"
        and (
            isinstance(thing, tuple)
            or getattr(thing, "__annotations__", {}).get("return") is rules.Rule
        )
    }
    page = (DOCS / "adding_an_architecture.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("\n## All rules\n")
    rows = re.findall(r"^\| `(\w+)(\(.*?\))?` \|", listed.partition("\n## ")[0], re.MULTILINE)
    assert {name for name, _ in rows} == ours
    for name, call in rows:  # the call that the page shows is valid
        if call:
            eval(f"{name}{call}", vars(rules))


def test_glossary_is_sorted_and_defines_each_word_once():
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = [line.split("|")[1].strip() for line in page.splitlines() if line[:2] == "| "][1:]
    assert words == sorted(set(words), key=lambda word: word.lower().replace("-", " "))
    assert len(words) > 50
