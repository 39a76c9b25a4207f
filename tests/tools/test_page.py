"""The HTML of reports: one file, everything escaped, tables that a screen reader can follow."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from sglang_diffkv import page
from sglang_diffkv.page import anything, document, figure, heat_map, html, is_number, size, table, tag

VOID = {"meta", "link", "br", "img", "input"}
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(1)>\"' onload=x \ud800"


class Outline(HTMLParser):
    """Elements with their attributes, and whether each was closed in its turn."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check_page(text: str) -> Outline:
    """Raise AssertionError unless it is a page as all of ours: nothing from elsewhere, no script, tables in order."""
    text.encode("utf-8")
    found = Outline(text)
    names = [name for name, _ in found.elements]
    assert not {"script", "img", "iframe", "link", "object", "embed"} & {*names}
    for name, attributes in found.elements:
        assert not any(key.startswith("on") for key in attributes), f"{name} has a handler"
        assert "src" not in attributes and (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page.STYLE and "@import" not in page.STYLE
    assert names.count("table") == names.count("caption") == names.count("thead")
    assert all(x.get("scope") in ("row", "col") for x in found.named("th"))
    assert [x for x in found.named("html") if x.get("lang") == "en"] and names.count("h1") == names.count("main") == 1
    assert "width=device-width" in str(found.named("meta")) and "prefers-color-scheme:dark" in page.STYLE
    anchors = [x["id"] for _, x in found.elements if x.get("id")]
    assert len({*anchors}) == len(anchors)
    assert all(str(x.get("href"))[1:] in anchors for x in found.named("a"))
    assert names.count("section") == names.count("h2")
    regions = [x for x in found.named("div") if x.get("role") == "region"]
    assert len(regions) == names.count("table") and all(x["tabindex"] == "0" and x["aria-label"] for x in regions)
    return found


def test_whatever_is_not_html_is_escaped() -> None:
    assert html("<b>&") == "&lt;b&gt;&amp;" and html([tag("b", "<")]) == "<b>&lt;</b>"
    assert tag("p", "x", title='"><i>', class_="c", aria_label=None) == '<p title="&quot;&gt;&lt;i&gt;" class="c">x</p>'
    hostile: dict[str, Any] = {ATTACK: ATTACK, "list": [{ATTACK: ATTACK}], "deep": {ATTACK: {ATTACK: [ATTACK]}}}
    parts = [page.Part("a", ATTACK, html([anything(ATTACK, hostile), table(ATTACK, [ATTACK], [[ATTACK]])]))]
    found = check_page(document(ATTACK, [ATTACK], parts, end=ATTACK))
    assert "<script>alert(1)</script>" in found.text, "it is shown as it is"


def test_any_data_is_shown_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: Any = 1
    for _ in range(1000):
        nested = {"in": nested}
    assert "nested too deep" in anything("x", nested)
    assert len(anything("x", {"a": "y" * 10**6})) < 3000
    monkeypatch.setattr(page, "MOST_ROWS", 3)
    many = anything("x", {str(i): i for i in range(10)}) + anything("y", [{"a": i} for i in range(7)])
    assert "the first 3 of 10" in many and "the first 3 of 7" in many and many.count("<tr>") == 2 * (1 + 3)
    for value in (None, [], {}, "", [[1, 2], {"a": 1}], [{"a": 1}, {"b": float("nan")}], True, 10**30):
        check_page(document("t", [], [page.Part("a", "A", anything("x", value))]))


def test_figures_have_the_unit_of_their_name() -> None:
    assert [figure(*x) for x in (("host_bytes", 3 << 20), ("bytes_most", 1), ("share_high", 0.5), ("n", 12345))] == [
        "3.0 MiB",
        "1 B",
        "50.0%",
        "12,345",
    ]
    assert figure("pages", 2048, "bytes") == "2.0 KiB" and figure("share_outside", 0.02, "bytes") == "2.0%"
    assert figure("x", None) == "not set" and figure("x", True) == "yes" and figure("x", float("inf")) == "inf"
    assert figure("x", {"a": 1, "b": 0.5}) == "a 1, b 0.500" and figure("x", ["a", "b"]) == "a, b"
    assert size(1023) == "1,023 B" and size(5 << 50) == "5,120.0 TiB"
    assert is_number("1,234") and is_number("-0.5%") and is_number("3.0 MiB") and not is_number("K8V4")


def test_cells_of_a_map_are_shaded_from_the_smallest_to_the_largest() -> None:
    found = Outline(heat_map("x", "layer", [[0.0, 5.0], [10.0, 10.0]], ["0", "1"]))
    assert [x["class"] for x in found.named("td")] == ["l0", "l5", "l9", "l9"]
    assert "x; 0.0 to 10.0" in found.text
    for flat in ([[0.0, 0.0]], [[7.0]], [[]], []):
        assert all(x.get("class") in ("l0", None) for x in Outline(heat_map("x", "y", flat, ["0"])).named("td"))


def _contrast(first: str, second: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((light(first), light(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_numbers_can_be_read_on_every_shade() -> None:
    for colours, bright in zip((page._LIGHT, page._DARK), page._BRIGHT_TEXT, strict=True):
        for level, colour in enumerate(colours):
            assert _contrast(colour, "ffffff" if level in bright else "0b0f14") >= 4.5, (colour, level)
