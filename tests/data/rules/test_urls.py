from pathlib import Path

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.filters.heuristics import Urls, host_of


def reasons(rule: Urls, *addresses: str | None) -> list[str | None]:
    number = len(addresses)
    return judge([rule], DocumentColumns(["text"] * number, ["web"] * number, addresses, ["id"] * number)).reasons


@pytest.mark.parametrize(
    "address",
    [
        "http://example.com",
        "https://www.Example.COM/page?x=1",
        "https://a.b.example.com:8443/",
        "example.com/path",
        "//example.com.",
        "https://user:word@example.com/",
        "HTTPS://EXAMPLE.COM#top",
    ],
)
def test_a_listed_host_and_all_below_it_are_dropped(address: str) -> None:
    assert reasons(Urls(hosts=("example.com",)), address) == ["urls.host"]


@pytest.mark.parametrize(
    "address",
    [None, "", "https://notexample.com", "https://example.com.org/", "https://x.org/example.com", "http://[x", "com"],
)
def test_other_hosts_and_documents_without_one_stay(address: str | None) -> None:
    assert reasons(Urls(hosts=("example.com",)), address) == [None]


def test_a_host_in_the_letters_of_its_language_is_the_one_that_dns_knows() -> None:
    assert host_of("https://www.Bücher.example/x") == host_of("xn--bcher-kva.example").replace("xn", "www.xn", 1)
    assert reasons(Urls(hosts=("bücher.example",)), "http://shop.xn--bcher-kva.example/") == ["urls.host"]
    assert reasons(Urls(hosts=("XN--BCHER-KVA.example",)), "http://BÜCHER.example/") == ["urls.host"]
    assert reasons(Urls(hosts=("https://*.example.org/",)), "http://a.example.org") == ["urls.host"]
    assert reasons(Urls(hosts=("example.org",)), "http://" + "ü" * 80 + "..example.org/") == ["urls.host"]


def test_words_of_an_address_count_as_a_whole() -> None:
    rule = Urls(words=("casino",))
    assert reasons(rule, "http://x.org/Casino-royale", "http://casino.example", "http://x.org/casinos") == [
        "urls.words",
        "urls.words",
        None,
    ]
    two = Urls(words=("free", "poker"), min_words=2)
    assert reasons(two, "http://free.org/poker", "http://free.org/free", "http://x.org/a%2Dpoker_free") == [
        "urls.words",
        None,
        "urls.words",
    ]


def test_lists_stand_in_files_and_what_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("# bad ones\n\nExample.com\nother.org\n")
    (tmp_path / "words.txt").write_text("bingo\n")
    rule = Urls(hosts_path=tmp_path / "hosts.txt", words_path=tmp_path / "words.txt")
    assert reasons(rule, "http://www.other.org", "http://fine.org/bingo", "http://fine.org") == [
        "urls.host",
        "urls.words",
        None,
    ]
    with pytest.raises(DataError, match=r"missing\.txt: cannot be read"):
        reasons(Urls(hosts_path=tmp_path / "missing.txt"), "http://x.org")
    with pytest.raises(ConfigError, match="has neither hosts nor words"):
        build(Urls, {})


def test_a_list_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("example.com\n")
    rule = Urls(hosts_path=path)
    assert reasons(rule, "http://example.com", "http://example.org") == ["urls.host", None]
    path.write_text("# other\nexample.org\n")
    assert reasons(rule, "http://example.com", "http://example.org") == [None, "urls.host"]
