"""Sphinx's settings: `sphinx-build docs site`. Nothing is fetched, neither here nor by a reader."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from functorch_zero.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

from public_names import with_public_names

project = "functorch_zero"
author = "the authors of functorch_zero"
version = release = __version__

extensions = [
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links name headings as GitHub does
nb_execution_mode = "off"  # the tests run the blocks of pages

# The places of a few names of others; whole inventories would have to be fetched
_OTHERS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
intersphinx_mapping = {name: (url, f"inventories/{name}.inv") for name, url in _OTHERS.items()}

html_theme = "furo"
html_title = "functorch_zero"
html_show_copyright = False  # it would name nobody
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path: list[str] = []
exclude_patterns = ["**/.ipynb_checkpoints"]

smartquotes_action = "De"  # dashes, but no quotes: those are code's
default_role = "code"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # a field of a class is no second entry beside its property
napoleon_use_rtype = False
suppress_warnings = ["ref.python"]  # several classes have a field of one name


def as_rst(text: str) -> str:
    """A docstring of this package, whose text is as in Markdown, for Sphinx.

    Code stands in single backticks, perhaps with an ending as in `leaf`s, or in indented paragraphs
    outside of sections (`Args:` and the like); stars and trailing underscores mean themselves.
    """
    made, in_section = [], False
    for paragraph in text.split("\n\n"):
        indented = paragraph.startswith("    ")
        in_section = re.match(r"[A-Z]\w+:\n", paragraph) is not None or (in_section and indented)
        if paragraph.lstrip().startswith(">>>"):
            made.append(paragraph)
        elif indented and not in_section:
            made += ["::", paragraph]
        else:
            made.append("".join(map(_inline, re.split(r"(`[^`]+`\w*)", paragraph))))
    return "\n\n".join(made)


def _inline(part: str) -> str:
    if code := re.fullmatch(r"(`[^`]+`)(\w*)", part):
        return f"`{code[1]}`" + (f"\\ {code[2]}" if code[2] else "")
    return re.sub(r"\*|_(?!\w)", r"\\\g<0>", part)


def rewrite_docstring(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = as_rst("\n".join(lines)).split("\n")


def list_public_names(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = with_public_names(source[0])


FETCHED = re.compile(r'<(?:link|script|img|iframe)\b[^>]*\b(?:href|src)="(?:https?:)?//[^"]*"')


def check_nothing_is_fetched(app: Sphinx, error: Exception | None) -> None:
    """No page has fonts, scripts, styles or pictures of other hosts."""
    for page in [] if error else sorted(Path(app.outdir).rglob("*.html")):
        if fetched := FETCHED.search(page.read_text()):
            raise SphinxError(f"{page} fetches from elsewhere: {fetched[0]}")


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """`llms.txt`: the pages by group, each with its first sentence, as https://llmstxt.org says."""
    if error:
        return
    lines = ["# functorch_zero", "", "> " + _first_sentence(app, "index"), ""]
    for node in app.env.get_doctree("index").findall(toctree):
        lines += [f"## {node['caption']}", ""]
        for _, page in node["entries"]:
            title = app.env.titles[page].astext()
            source = app.env.doc2path(page, base=False)
            lines.append(f"- [{title}](_sources/{source}.txt): {_first_sentence(app, page)}")
        lines.append("")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines))


def _first_sentence(app: Sphinx, page: str) -> str:
    paragraph = next(app.env.get_doctree(page).findall(nodes.paragraph))
    return re.split(r"(?<=\.)\s", paragraph.astext().replace("\n", " "), maxsplit=1)[0]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", rewrite_docstring, priority=400)  # before napoleon
    app.connect("source-read", list_public_names)
    app.connect("build-finished", write_llms_txt)
    app.connect("build-finished", check_nothing_is_fetched)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
