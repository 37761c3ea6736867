"""Run the tutorial in a fresh kernel: `python -m docs.run_tutorial`.

It writes the outputs into `begin/tutorial.ipynb`. `tests/test_tutorial.py` compares them.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

TUTORIAL = Path(__file__).with_name("begin") / "tutorial.ipynb"


def executed(notebook: NotebookNode) -> NotebookNode:
    """The same notebook with the outputs of this run; a cell that raises is an error here."""
    # Sockets are files: no other user of this machine can reach the kernel
    config = Config(KernelManager={"transport": "ipc"})
    client = NotebookClient(
        notebook.copy(), config=config, timeout=100, record_timing=False, coalesce_streams=True
    )
    made = client.execute()
    made.metadata["language_info"] = {"name": "python"}  # without a version
    return made


if __name__ == "__main__":
    nbformat.write(executed(nbformat.read(TUTORIAL, as_version=4)), TUTORIAL)
