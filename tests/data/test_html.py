import pytest

from bloomery.data.readers import web
from bloomery.data.readers.bytes import ReadError

pytest.importorskip("resiliparse", reason="the extra web is not installed")


def test_the_text_of_a_page_keeps_paragraphs_and_leaves_out_what_stands_around_them() -> None:
    page = "<title>T</title><script>x=1</script><nav>menu</nav><main><p>One &amp; two.</p><p>Three<br>four</p></main>"
    assert web.plain_text(page, main_content=True) == "One & two.\n\nThree\nfour"
    whole = web.plain_text(page, main_content=False)
    assert isinstance(whole, str)
    assert "menu" in whole
    assert "x=1" not in whole


@pytest.mark.parametrize("head", ["<title/>", '<script src="a.js"/>', "<style type='text/css' />"])
def test_elements_that_xml_closes_at_once_hold_nothing_of_the_page(head: str) -> None:
    page = f'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">{head}<body><p>It is here.</p>'
    assert "It is here." in str(web.plain_text(page + "</body></html>", main_content=False))


def test_a_page_nested_a_hundred_thousand_deep_is_a_problem_and_many_open_paragraphs_are_not() -> None:
    found = web.plain_text("<div>" * 100_000 + "deep", main_content=True)
    assert isinstance(found, ReadError)
    assert (found.reason, found.value) == ("too_deep", 100_000)
    assert web.plain_text("<p>x<br>" * 3_000 + "<div></div>" * 3_000, main_content=False)
    assert web.plain_text("<div>" * 900 + "deep", main_content=False) == "deep"


@pytest.mark.parametrize(
    ("text", "encoding", "charset"),
    [
        ("À la crème brûlée, s'il vous plaît, déjà vu", "latin-1", None),
        ("Это простой текст на русском языке, и он достаточно длинный.", "cp1251", "windows-1251"),
        ("これはテストです。日本語のテキスト。", "shift-jis", None),
        ("naïve", "utf-8", None),
        ("naïve", "utf-8", "utf-8"),
        ("naïve", "utf-8-sig", None),
        ("with a mark", "utf-16", None),
    ],
)
def test_bytes_are_decoded_as_told_or_as_they_look(text: str, encoding: str, charset: str | None) -> None:
    assert web.decoded(text.encode(encoding), charset, page=False) == text


def test_a_page_says_its_encoding_and_bytes_with_nul_are_no_text() -> None:
    page = '<meta charset="windows-1251"><p>Это</p>'
    assert web.decoded(page.encode("cp1251"), page=True) == page
    assert isinstance(found := web.decoded(b"ab\0cd", page=False), ReadError)
    assert (found.reason, found.value) == ("binary", 2)


@pytest.mark.parametrize(
    ("text", "encoding", "told"),
    [
        ("Café – это тест", "utf-8", "iso-8859-1"),
        ("naïve", "utf-8", "windows-1252"),
        ("Größe", "utf-8", "koi8-r"),
        ("Zażółć gęślą jaźń", "utf-8", "utf-16"),
        ("这个网页说自己是国标码，其实不是这样的，它是别的。", "utf-8", "gb2312"),
        ("ここは日本語のページですが、宣言が間違っています。", "utf-8", "euc-jp"),
        ("naïve", "utf-8-sig", "iso-8859-1"),
        ("Это", "utf-16", "windows-1251"),
        ("Это", "utf-32", "windows-1251"),
        ("这个", "utf-8-sig", "gbk"),
        ("Größe", "iso-8859-1", "iso-8859-1"),
        ("Это простой текст", "cp1251", "windows-1251"),
        ("这是国标码的网页，它没有说谎，一个字也没有。", "gbk", "gb2312"),
        ("plain", "ascii", "windows-1251"),
    ],
)
def test_the_bytes_win_over_what_a_page_or_a_header_says_of_them(text: str, encoding: str, told: str) -> None:
    page = f'<html><head><meta charset="{told}"></head><body><p>{text}</p></body></html>'
    assert web.decoded(page.encode(encoding), page=True) == page
    plain = page.replace(f'<meta charset="{told}">', "")
    assert web.decoded(plain.encode(encoding), told, page=True) == plain


def test_few_characters_of_two_bytes_are_what_the_page_says_they_are() -> None:
    chance = "".join(a + b for a in "茅脙" for b in "茅脟")  # as GBK they are UTF-8 too
    page = f'<meta charset="gbk"><p>{chance}</p>'
    assert page.encode("gbk").decode() != page
    assert web.decoded(page.encode("gbk"), page=True) == page


def test_nul_behind_a_mark_of_utf_8_is_no_text_and_broken_bytes_there_are_replaced() -> None:
    assert isinstance(web.decoded(b"\xef\xbb\xbfab\0", "utf-16", page=False), ReadError)
    assert web.decoded(b"\xef\xbb\xbfab\xff", page=False) == "ab\ufffd"
