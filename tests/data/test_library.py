from bloomery.data.sources import stdlib


def test_the_language_reference_is_what_help_prints() -> None:
    topics = stdlib.topics()
    assert topics["assert"].startswith('The "assert" statement')
    assert len(topics) > 60


def test_docstrings_keep_signatures_and_leave_out_what_is_private() -> None:
    source = '''"""About the module."""
import sys
if sys.platform:
    def f(a: int, *, b=(1, 2)) -> str:
        """First line.

        Second \\d paragraph.
        """
class C(Base):
    """A class."""
    def method(self): "Does it."
    def _hidden(self): "Not shown."
    async def wait(self): "Waits."
def undocumented(): pass
'''
    assert stdlib.docstrings("m", source) == (
        "m\n\nAbout the module.\n\n\n"
        "m.f(a: int, *, b=(1, 2)) -> str\n\n    First line.\n\n    Second \\d paragraph.\n\n\n"
        "class m.C(Base)\n\n    A class.\n\n\n"
        "m.C.method(self)\n\n    Does it.\n\n\n"
        "async m.C.wait(self)\n\n    Waits.\n"
    )
    assert stdlib.docstrings("m", "x = 1") == ""


def test_the_files_are_sources_without_tests_packages_and_tables() -> None:
    names = [name for name, _ in stdlib.files()]
    assert {"json/decoder.py", "ast.py"} <= set(names)
    assert names == sorted(set(names))
    assert not any(part in name.split("/") for name in names for part in ("test", "site-packages", "encodings"))


def test_a_module_is_named_as_it_is_imported() -> None:
    assert stdlib.module_name("json/decoder.py") == "json.decoder"
    assert stdlib.module_name("json/__init__.py") == "json"
    assert stdlib.url("json/decoder.py").endswith("/Lib/json/decoder.py")
