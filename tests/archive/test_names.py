"""Names from the service never lead out of the archive, and no two documents get the same one."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signing_async import ConfigurationError, Document, Signing
from signing_async.archive.names import DEFAULT_TEMPLATE, Template  # a property test needs thousands of names

DAY = datetime(2031, 3, 9, 12, tzinfo=UTC)
SERVICE = "https://tenant.example.com"


def names_of(*documents: str, template: str = DEFAULT_TEMPLATE, signing: str = "Lease", id: str = "s1") -> list[str]:
    """Return the names of documents, completed on ``DAY``, in a signing."""
    records = tuple(Document(f"d{number}", name, DAY) for number, name in enumerate(documents))
    return list(Template(template).names(SERVICE, Signing(id, signing, documents=records)).values())


def test_every_field_can_be_used_and_the_date_is_that_of_the_completion_in_utc() -> None:
    every = "{year}-{month}-{day}/{signing.id} {signing.name}/{{{document.id}}} {document.name}.pdf"
    assert names_of("a.PDF", template=every) == ["2031-03-09/s1 Lease/{d0} a.pdf"]
    late = datetime(2031, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    template, document = Template(DEFAULT_TEMPLATE), Document("d", "a", late)
    assert template.names(SERVICE, Signing("s", "L", documents=(document,))) == {"d": "2032/L-s/a.pdf"}
    of_signing = Signing("s", "L", updated_at=DAY, documents=(Document("d", "a"),))
    assert template.names(SERVICE, of_signing) == {"d": "2031/L-s/a.pdf"}
    assert template.names(SERVICE, Signing("s", "L", documents=(Document("d", "a"),))) == {"d": "undated/L-s/a.pdf"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../etc/passwd", "_.._etc_passwd"),
        ("", "unnamed"),
        ("a\0b\nc\x7f", "a_b_c_"),
        ("evil\u202egpj.exe", "evil_gpj.exe"),
        ("two  words\u00a0 three. ", "two words three"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("console", "console"),
        ("A\u030a", "Å"),
        ("manifest.jsonl", "_manifest.jsonl"),
        ("é" * 100, "é" * 40),
    ],
)
def test_value_is_cleaned(name: str, expected: str) -> None:
    assert names_of(name, template="{document.name}/{signing.id}") == [f"{expected}/s1.pdf"]


def test_documents_of_a_signing_with_the_same_name_get_different_ones() -> None:
    """Also where a file system ignores case, or normalizes."""
    for first, second in [("a.pdf", "a.pdf"), ("Lease", "lease.PDF"), ("Å", "A\u030a"), ("ﬁ", "fi"), ("a/b", "a:b")]:
        other, *found = names_of("other", first, second)
        assert other == "2031/Lease-s1/other.pdf"
        assert len({unicodedata.normalize("NFKC", name).casefold() for name in found}) == 2


@pytest.mark.parametrize(
    ("template", "signing", "id"),
    [
        ("{document.name}", "Lease", "s"),
        (DEFAULT_TEMPLATE, "Lease", "s/"),
        (DEFAULT_TEMPLATE, "Lease", "s" * 90),
        ("{signing.name}{signing.name}{signing.name}{signing.id}{document.name}", "x" * 90, ""),
    ],
    ids=["no id", "id that is cleaned", "id that is cut", "part that is cut"],
)
def test_name_that_another_signing_could_get_has_a_hash_of_the_ids(template: str, signing: str, id: str) -> None:
    one, two = (names_of("a", template=template, signing=signing, id=f"{id}{number}")[0] for number in range(2))
    assert one != two
    assert max(len(one), len(two)) < 256


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("", "must be a non-empty string"),
        ("{signing.name", "expected '}'"),
        ("{signing.owner}", "unknown field {signing.owner}"),
        ("{signing.name!r}", "unknown field"),
        ("../{year}", "empty or begins with a dot"),
        ("a:b{year}", "a character that file names must not have"),
    ],
)
def test_invalid_template_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^template: ") as caught:
        Template(template)
    assert problem in str(caught.value)


@settings(max_examples=150)
@given(
    st.lists(st.text(max_size=300), min_size=1, max_size=4),
    st.text(max_size=300),
    st.text(min_size=1, max_size=100),
    st.sampled_from([DEFAULT_TEMPLATE, "{document.name}", "{signing.name}/{document.id}", "{signing.id}"]),
)
def test_no_name_escapes_or_collides(documents: list[str], signing: str, id: str, template: str) -> None:
    found = names_of(*documents, template=template, signing=signing, id=id)
    assert len({unicodedata.normalize("NFKC", name).casefold() for name in found}) == len(documents)
    for name in found:
        assert name.endswith(".pdf")
        assert name.count("/") == template.count("/")
        for part in name.split("/"):
            assert part
            assert len(part.encode()) < 256
            assert part == part.strip(" ")
            assert not part.startswith(".")
            assert not part.endswith(".")
            assert part.isprintable()
            assert not set(part) & set('\\:*?"<>|')
            assert part.lower() != "manifest.jsonl"
