"""Execute a notebook in its folder: `python run_notebook.py NOTEBOOK`. Prints the output of each cell."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat  # type: ignore[import-not-found]
from nbclient import NotebookClient  # type: ignore[import-not-found]

TIMEOUT_S = 240  # for each cell


def main(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    folder = {"path": str(path.parent)}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": folder}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "execute_result":
                print(cell["id"], output["data"].get("text/html", output["data"]["text/plain"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
