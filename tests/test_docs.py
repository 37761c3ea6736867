"""The README and docs say what is true: their blocks run, every public name is in them, the
commands are CI's."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.scripts import Ended, run_command, run_in_fork, run_script
from tests.tiers import tiers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = ROOT / "docs" / "reference" / "api"
SKIP = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
PACKAGES = ["functorch_zero"] + [
    f"functorch_zero.{name}"
    for name in (
        "checkpoint",
        "compress",
        "errors",
        "optim",
        "optim.contrib",
        "optim.rows",
        "places",
        "planning",
        "testing",
    )
]


def blocks(text: str) -> tuple[str, list[tuple[int, str]]]:
    """A page's Python, on the lines it has in the page; and its skipped blocks, as (line, reason).

    A fenced block is Python when its fence says
    ```python. The line before it may say <!-- not run: reason -->.
    """
    code, skipped, fence, reason = [], [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        kept = ""
        if fence is None and line.startswith("```"):
            fence = line.removeprefix("```").strip()
            if fence == "python" and reason:
                skipped.append((number, reason))
                fence = "skipped"
        elif line.startswith("```"):
            fence = None
        elif fence == "python":
            kept = line
        match = SKIP.fullmatch(line.strip())
        reason = match["reason"] if match else reason if not line.strip() else ""
        code.append(kept)
    assert fence is None, "a fenced block is not closed"
    return "\n".join(code) + "\n", skipped


def script_of(page: Path, folder: Path) -> Path:
    """All blocks of a page as one script. A traceback's line numbers are the page's."""
    code, _ = blocks(page.read_text())
    script = folder / f"{page.stem}.py"
    script.write_text(code)
    return script


WITH_CODE = [page for page in PAGES if blocks(page.read_text())[0].strip()]
QUICK = WITH_CODE[::24]  # the README is the first
OTHERS = [page for page in WITH_CODE if page not in QUICK]


@pytest.mark.parametrize(
    ("page", "run"),
    tiers(
        [(page, run_in_fork) for page in QUICK],
        [(page, run_in_fork) for page in OTHERS],
        [(page, run_script) for page in WITH_CODE],
        rows=True,
    ),
    ids=[*(f"{page.stem}-fork" for page in QUICK + OTHERS), *(page.stem for page in WITH_CODE)],
)
def test_blocks_run(page: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    out = run(script_of(page, tmp_path), folder=tmp_path).check()
    for text in re.findall(
        r"^prints\n\n```text\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        assert text in out, f"{page.name} says that it prints what it does not:\n{text}"


@pytest.mark.thorough
def test_the_readme_under_torchrun(tmp_path: Path) -> None:
    """`launch` returns this rank's result alone there."""
    script = script_of(ROOT / "README.md", tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run_command(sys.executable, *torchrun, str(script), folder=tmp_path).check()
    # Two ranks print at once, and their lines may run into each other
    assert len(re.findall(r"loss \d\.\d\d", out)) == 2


@pytest.mark.parametrize("run", [run_in_fork, run_script])
def test_a_wrong_block_fails(run: Callable[..., Ended], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    result = run(script_of(page, tmp_path), folder=tmp_path)
    assert result.returncode == 1
    assert "line 8" in result.stderr


@pytest.mark.parametrize("run", [run_in_fork, run_script])
def test_a_warning_fails(run: Callable[..., Ended], tmp_path: Path) -> None:
    script = tmp_path / "warns.py"
    script.write_text("import warnings\nwarnings.warn('of something')\n")
    result = run(script, folder=tmp_path)
    assert result.returncode == 1
    assert "UserWarning: of something" in result.stderr


def test_a_block_is_skipped_only_with_a_reason() -> None:
    code, skipped = blocks("<!-- not run: needs two hosts -->\n```python\nx = 1\n```\n")
    assert not code.strip()
    assert skipped == [(2, "needs two hosts")]
    assert blocks("<!-- not run: -->\n```python\nx = 1\n```\n")[0].strip() == "x = 1"


def docs_text() -> str:
    return "\n".join(page.read_text() for page in PAGES[1:])


def test_tests_that_docs_name_are_there() -> None:
    named = set(re.findall(r"(?:[\w]+/)*test_\w+\.py", docs_text()))
    assert named
    missing = {
        name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).exists()
    }
    assert not missing, "the docs name tests by their path below tests/"


def documented() -> list[str]:
    """What the pages of the API list: dotted names."""
    text = "\n".join(page.read_text() for page in sorted(API.glob("*.md")))
    text = run_path(str(ROOT / "docs" / "public_names.py"))["with_public_names"](text)
    return re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)


def test_every_public_name_is_on_one_api_page() -> None:
    """Under the package it is public in; where a module has the same name, under the module that
    defines it."""
    expected = []
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            thing = getattr(package, name)
            if isinstance(thing, ModuleType):
                in_package = [f"{package.__name__}.{name}.{own}" for own in own_names(thing)]
                expected += [] if thing.__name__ in PACKAGES else in_package
            else:
                hidden = (Path(package.__file__).parent / f"{name}.py").exists()
                expected.append(f"{thing.__module__ if hidden else package.__name__}.{name}")
    found = documented()
    missing = sorted(set(expected) - set(found))
    assert not missing, f"docs/reference/api lacks {missing}"
    assert len(found) == len(set(found)), "a name is in docs/reference/api twice"


def test_every_name_on_the_api_pages_exists() -> None:
    for name in documented():
        assert resolve_name(name) is not None, name


def own_names(module: ModuleType) -> list[str]:
    """What a module without `__all__` defines publicly."""
    public = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    return [n for n, t in public.items() if getattr(t, "__module__", "") == module.__name__]


@pytest.mark.parametrize("module", PACKAGES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    package = importlib.import_module(module)
    things = {name: getattr(package, name) for name in package.__all__}
    bare = [
        name
        for name, t in things.items()
        if inspect.isroutine(t) or inspect.isclass(t)
        if not inspect.getdoc(t)
    ]
    assert not bare


def long_lines(text: str) -> list[int]:
    """The numbers of prose lines over 100 columns.

    Code, tables and headings may be longer, and so may a line without a place to break it, such as
    one link.
    """
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and len(line) > 100 and not line.startswith(("|", "#")):
            words = line.removeprefix("- ").split()
            found += [number] if len(words) > 1 else []
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_lines_have_100_columns(page: Path) -> None:
    assert not long_lines(page.read_text()), f"wrap these lines of {page.name}"


def test_a_long_line_is_found() -> None:
    fits, link, long = "a" * 49 + " " + "b" * 50, "x" * 101, "a" * 50 + " " + "b" * 50
    allowed = f"# {long}\n{fits}\n{link}\n- {link}\n| {long} |\n```sh\n{long}\n```\n"
    assert not long_lines(allowed)
    assert long_lines(f"{allowed}{long}\n\n- {fits}\n") == [9, 11]


def test_links_between_pages_exist() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def headless_tables(text: str) -> list[int]:
    """The numbers of lines under which a table should begin, without a line of its heads: without
    one it is a paragraph of bars."""
    lines = ["", *text.splitlines()]
    return [
        number
        for number, line in enumerate(lines)
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+\s*", line) and not lines[number - 1].startswith("|")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_have_heads(page: Path) -> None:
    assert not headless_tables(page.read_text()), f"these tables of {page.name} lack a first line"


def test_a_headless_table_is_found() -> None:
    assert headless_tables("| a | b |\n|---|---|\n| 1 | 2 |\n\n|---|---|\n| 1 | 2 |\n") == [5]


def headings() -> str:
    """Of users' pages; the site's search ranks these first."""
    pages = [page for page in PAGES[1:] if "maintain" not in page.parts]
    found = (re.findall(r"^#+ (.+)$", blanked(page.read_text()), re.MULTILINE) for page in pages)
    return "\n".join(heading for page in found for heading in page).lower()


def blanked(text: str) -> str:
    """Without fenced blocks, whose comments would be headings."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "sought",
    [
        *(
            "activation checkpointing",
            "batchnorm",
            "compression",
            "distillation",
            "ema",
            "embedding",
        ),
        *("gan", "gradient accumulation", "gradient clipping", "hsdp", "hugging face", "lora"),
        *(
            "meta device",
            "mixed precision",
            "offload",
            "optax",
            "resume",
            "several networks",
            "srun",
        ),
        *("tables", "teacher", "torch.compile", "torchrun", "whole batch"),
    ],
)
def test_what_people_search_for_has_a_heading(sought: str) -> None:
    assert re.search(rf"\b{re.escape(sought)}", headings())


def test_every_option_of_torch_has_its_row() -> None:
    from torch.distributed import fsdp
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch itself imports is deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    makers = [
        *(DistributedDataParallel, ZeroRedundancyOptimizer, fsdp.FullyShardedDataParallel),
        *(fsdp.fully_shard, fsdp.CPUOffload, fsdp.CPUOffloadPolicy),
        *(fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy),
    ]
    options = {name for maker in makers for name in inspect.signature(maker).parameters}
    options |= {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
    pages = [ROOT / "docs" / page for page in ("begin/migration.md", "howto/precision.md")]
    text = "".join(page.read_text() for page in pages)
    missing = {name for name in options if not re.search(rf"\b{name}\b", text)}
    assert not missing, "docs/begin/migration.md lacks a row"


def test_ci_runs_the_readmes_test_command() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (command,) = [line for line in lines if line.endswith("pytest -n auto")]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_ci_runs_the_thorough_tests() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[
        -1
    ] == ".venv/bin/pytest -m thorough -n auto"


@pytest.mark.parametrize("name", tiers(["life"], ["levels"]))
def test_the_pictures_are_what_plan_says(name: str) -> None:
    svg = run_path(str(ROOT / "docs" / f"draw_{name}.py"))["svg"]
    assert svg() == (ROOT / "docs" / f"{name}.svg").read_text(), (
        f"run python -m docs.draw_{name} again"
    )


def test_decisions_are_what_holds() -> None:
    """A new one takes out what it replaces."""
    assert len((ROOT / "docs" / "decisions.md").read_text().split()) <= 6000


def test_every_example_is_in_the_gallery() -> None:
    """A page with its code, a picture that is small, and few words; a card."""
    gallery = ROOT / "docs" / "gallery"
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert names == sorted(path.stem for path in gallery.glob("*.svg"))
    assert names == sorted(page.stem for page in gallery.glob("*.md") if page.stem != "index")
    for name in names:
        page = (gallery / f"{name}.md").read_text()
        assert f"]({name}.svg)" in page and f"{{literalinclude}} ../../examples/{name}.py" in page
        assert len(page.split()) < 100, name
        picture = (gallery / f"{name}.svg").read_text()
        assert ElementTree.fromstring(picture).tag.endswith("svg") and len(picture) < 10_000, name
    cards = re.findall(r"^:link: (\w+)$", (gallery / "index.md").read_text(), re.MULTILINE)
    assert sorted(cards) == names
