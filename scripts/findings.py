"""
What `bloomery doctor` tells each machine of the tests that something is wrong with: the tables of docs/hw.md and
docs/findings.md.

`python scripts/findings.py` prints them; `--write` puts each between its marks in those pages.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bloomery.hw.doctor.report import examine  # noqa: E402
from tests.hw.bad_device import BadDevice, row  # noqa: E402
from tests.hw.machines import MATRIX, TROUBLES  # noqa: E402
from tests.hw.test_bad_device import FAULTS, outcome  # noqa: E402

PAGE, LIST = ROOT / "docs" / "hw.md", ROOT / "docs" / "findings.md"
MACHINES, FAULTY, SINGLE = "machines", "bad devices", "troubles"


def machines() -> str:
    """A section for each machine, with what it is told."""
    blocks = []
    for case in MATRIX.values():
        with tempfile.TemporaryDirectory() as folder:
            findings = examine(case.build(Path(folder)), Path(folder) / "runs")
            lines = [f"**{case.title}**", ""]
            wrong = [one for one in findings if one.status != "ok"]
            for one in wrong:
                lines += [f"- `{one.id}` {one.status}: {one.value}", "", "  ```sh", f"  {one.hint}", "  ```", ""]
            if not wrong:
                lines += ["- nothing to cure", ""]
            blocks.append("\n".join(lines).replace(folder, ""))
    return "\n".join(blocks).strip()


def troubles() -> str:
    """A part for each single thing that was changed on a machine that is sound otherwise."""
    blocks = []
    for name, trouble in TROUBLES.items():
        with tempfile.TemporaryDirectory() as folder:
            host, id = trouble.build(Path(folder)), trouble.finding.partition(":")[0]
            found = {one.id: one for one in examine(host, Path(folder) / "runs")}[id]
            lines = [f"**{name}** ({MATRIX[trouble.on].title})", ""]
            lines += [f"- `{found.id}` {found.status}: {found.value}", "", "  ```sh", f"  {found.hint}", "  ```", ""]
            blocks.append("\n".join(lines).replace(folder, ""))
    return "\n".join(blocks).strip()


def bad_devices() -> str:
    """A row for each fault that was given to a kernel."""
    rows = ["| trial | operation | fault | what is told |", "|---|---|---|---|"]
    with BadDevice() as device:
        for name, fault, operation, _ in FAULTS:
            found = outcome(device.has(fault, operation), name, seconds=2.0 if fault == "hang" else 60.0)
            rows.append(row(name, fault, operation, found.why))
    return "\n".join(rows)


def block(page: str, name: str) -> str:
    """What stands between the marks of a name."""
    return page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].strip("\n")


def main() -> None:
    for page, name, made in ((PAGE, MACHINES, machines()), (PAGE, FAULTY, bad_devices()), (LIST, SINGLE, troubles())):
        if "--write" not in sys.argv:
            print(made)
            continue
        text, start, end = page.read_text(encoding="utf-8"), f"<!-- {name} -->", f"<!-- /{name} -->"
        text = text.partition(start)[0] + f"{start}\n{made}\n{end}" + text.partition(end)[2]
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
