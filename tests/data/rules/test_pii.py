from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.filters import heuristics
from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.filters.heuristics import Length, Pii, PrivateKind

PIECES = ("a@", "1.1.", "a" * 100, ":=\"'", "2001:", "+1 ", "-----BEGIN PRIVATE", "@a.", '="' + "a" * 20)
ALL: tuple[PrivateKind, ...] = ("mail", "ip", "phone", "key")
# put together here, so that no scanner takes this file for a leak
AWS, GITHUB, SLACK = "AKIA" + "IOSFODNN7EXAMPLE", "ghp_" + "a1B2c3D4e5F6" * 3, "xoxb" + "-1234567890-abcdef"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
BLOCK = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nabc==\n-----END RSA " + "PRIVATE KEY-----"


def masked(text: str, *kinds: PrivateKind) -> str:
    return heuristics.masked(text, heuristics.find(text, kinds or ALL))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to ada.l+x@mail.example.co.uk.", "Write to <EMAIL>."),
        ("<a href='mailto:ada@example.org'>Ada</a>", "<a href='mailto:<EMAIL>'>Ada</a>"),
        ("(ada@example.org, bob_1@example.org)", "(<EMAIL>, <EMAIL>)"),
        ("“ada@example.org”文字bob@example.org。", "“<EMAIL>”文字<EMAIL>。"),
        ("from 93.184.216.34 to http://93.184.216.35:80/x", "from <IP> to http://<IP>:80/x"),
        ("[2606:2800:220:1:248:1893:25c8:1946]", "[<IP>]"),
        ("at 2606:2800:220::1946.", "at <IP>."),
        ("call +1 415-555-2671 or (415) 555-2671 or 415.555.2671", "call <PHONE> or <PHONE> or <PHONE>"),
        ("ring +49 30 901820.", "ring <PHONE>."),
        (f"id = {AWS}\nkey: {GITHUB}", "id = <KEY>\nkey: <KEY>"),
        (f"{SLACK} {JWT}", "<KEY> <KEY>"),
        (f"a\n{BLOCK}\nb", "a\n<KEY>\nb"),
        (f"a\n{BLOCK[:50]}", "a\n<KEY>"),
        ('API_KEY = "s8Jd0kQ1zX9bV4nM7pLw"', 'API_KEY = "<KEY>"'),
        ("{'client_secret': 'q8Zr-4Tn0_Lk2Vw9Xs7Yd5'}", "{'client_secret': '<KEY>'}"),
    ],
)
def test_what_is_private_is_masked_and_nothing_else_changes(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "@property\ndef f(self): return a @ b",
        "npm install lodash@4.17.21 @babel/core@7.0.0",
        "git clone git@github.com:user/repo.git",
        "icon@2x.png and sprite@3x.JPG",
        "a@b, @ada, ada@, @example.org",
        'version 1.2.3.4 and v2.14.33.120, AssemblyVersion("24.120.33.1"), pip install x==24.30.40.50',
        "8.8.8.8 and 1.1.1.1",
        "127.0.0.1 10.1.2.30 192.168.1.100 169.254.20.30 203.0.113.77 0.0.0.0 255.255.255.255",
        "999.184.216.34 093.184.216.34 93.184.216 93.184.216.34.5 x93.184.216.34",
        "std::vector<int> a::b ::1 fe80::1 2001:db8::1 20:15:30 12:34:56:78:9a:bc",
        "in 2024-2025, 1234567 people, 10.1038/s41586-020-2649-2, 3.14159265358979",
        "1-2-3 and 2020.01.02 and +12",
        'password = "correct horse battery"; token = "aaaaaaaaaaaaaaaaaaaa1"; secret = "your-example-key-123456"',
        'sha = "da39a3ee5e6b4b0d3255bfef95601890afd80709"',
        "AKIA and ghp_short and sk-learn and hf_hub",
    ],
)
def test_what_only_looks_private_stays(text: str) -> None:
    assert masked(text) == text


def test_addresses_that_mean_nobody_outside_are_found_where_asked_for() -> None:
    text = "127.0.0.1 192.168.1.100 fe80::1 ::1"
    assert heuristics.masked(text, heuristics.find(text, ["ip"], private_ips=True)) == "<IP> <IP> <IP> <IP>"


@given(st.text(alphabet="a1@.:-+ \"'=/_{}<>()文\n", max_size=200))
def test_masking_loses_only_what_was_found_and_finds_nothing_twice(text: str) -> None:
    spans = heuristics.find(text, ALL)
    assert all(one.start < one.end <= two.start for one, two in pairwise(spans))
    hidden = heuristics.masked(text, spans)
    assert len(hidden) == len(text) + sum(len(heuristics.PLACEHOLDERS[s.kind]) - (s.end - s.start) for s in spans)


def documents(*texts: str) -> DocumentColumns:
    return DocumentColumns(texts, ["web"] * len(texts), [None] * len(texts), [str(n) for n in range(len(texts))])


def test_a_masked_document_stays_with_its_counts_and_later_rules_see_what_is_left() -> None:
    texts = ("no address", "ada@example.org and bob@example.org from 93.184.216.34")
    found = judge([Pii(), Length(min_characters=0, max_characters=30)], documents(*texts))
    assert found.texts == ["no address", "<EMAIL> and <EMAIL> from <IP>"]
    assert found.reasons == [None, None]
    assert found.masked == [Counter(), Counter(mail=2, ip=1)]
    before = judge([Length(min_characters=0, max_characters=30), Pii()], documents(*texts))
    assert before.reasons == [None, "length.too_long"]
    assert before.texts == list(texts)


def test_a_document_can_be_dropped_instead_with_how_much_was_found() -> None:
    texts = ("no address", "ada@example.org and bob@example.org", "ada@example.org")
    found = judge([Pii(action="drop", max_hits=1)], documents(*texts))
    assert found.reasons == [None, "pii.mail", None]
    assert found.values == [0, 2, 0]
    assert found.texts == list(texts)


def test_a_text_of_a_million_marks_takes_no_longer_than_its_length() -> None:
    for piece in PIECES:
        text = piece * (200_000 // len(piece))
        heuristics.find(text, ALL)
