"""Figures of the notebooks for readers who do not run them: ``python -m benchmarks.notebook_figures``.

Executes every notebook and writes its figures to ``docs/notebooks/NOTEBOOK-1.png`` and so on. The notebooks
themselves are stored without outputs. It takes about three minutes; notebook 02 measures on this CPU, which
should be idle.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def export(notebook: Path, folder: Path) -> list[Path]:
    """Execute a notebook and write the figures that it shows; returns their paths."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=600, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    paths = [folder / f"{notebook.stem}-{number}.png" for number in range(1, len(images) + 1)]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(base64.b64decode(image))
    return paths


def main() -> None:
    """Export the figures of the named notebooks, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "notebooks", help="folder of the figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for notebook in options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        for path in export(notebook, options.out):
            print(path)


if __name__ == "__main__":
    main()
