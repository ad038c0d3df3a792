"""The markup that pages are made of."""

from __future__ import annotations

from signing_async.sandbox.pages.markup import render, tag


def test_lone_surrogates_are_replaced() -> None:
    assert render(tag("p", "a\ud800b", title="\udfff")).encode() == b'<p title="?">a?b</p>'


def test_attributes_and_children_of_all_kinds_are_rendered() -> None:
    made = tag("input", "no child", type="text", required=True, hidden=False, value=None, data_label='"', class_="a")
    assert render(made) == '<input type="text" required data-label="&quot;" class="a">'
    assert render(tag("p", "a<", 1, None, [tag("b", "&"), ("x",)])) == "<p>a&lt;1<b>&amp;</b>x</p>"
