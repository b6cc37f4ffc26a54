"""Sphinx's configuration of the documentation site: the READMEs, the notebooks and the docstrings of the public names.

`make docs` builds it in `build/site`. The source folder is the repository's root, so that the links between documents
work on the site and in a checkout. README.md is the start page; `navigation.md` is added to it.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[2]))

import pt2mx
from notebooks.site.names import contents, modules, page

SITE = Path(__file__).parent

project = "pt2mx"
root_doc = "README"
include_patterns = ["*.md", "notebooks/**", "pt2e/**/*.md", "**/README.md", "tests/neighbours/results.md"]
include_patterns += ["tests/engines/sglang.md", "tests/engines/vllm/results.md", "tests/benchmarks/peers/results.md"]
# pt2mx/fx, pt2mx/pt2e and pt2mx/configs are links to the folders of the root
exclude_patterns = ["pt2mx/fx", "pt2mx/pt2e", "pt2mx/configs", "build", ".*", "**/*.py", "notebooks/site/navigation.md"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks hold their outputs
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"pt2mx {pt2mx.__version__}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # the root of the site leads to its start page

#: what the first cell of each row of a list of source files is: the name of a file or folder
_FILE = re.compile(r"[\w./-]*\w(\.(py|cpp|h|html|css|js|toml|sh)|/)")


class Names(SphinxDirective):
    """List the public names of the modules that the argument names, with links to their pages."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(contents(self.arguments[0].split()))


def write_pages() -> None:
    """Write a page for each module of `api.md`, where Sphinx looks for pages."""
    folder = SITE / "api"
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{module}.md": page(module) for module in modules((SITE / "api.md").read_text())}
    for removed in set(folder.iterdir()) - set(pages):
        removed.unlink()
    for file, text in pages.items():
        if not file.exists() or file.read_text() != text:  # an unchanged file is not built again
            file.write_text(text)


def as_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Leave the folder out of the title of a README, and add the navigation to the start page."""
    source[0] = re.sub(r"\A# [\w/]+/: (.)", lambda match: f"# {match[1].upper()}", source[0])
    if name == root_doc:
        source[0] += (SITE / "navigation.md").read_text()


def fold_source_files(app: Sphinx, tree: nodes.document) -> None:
    """Put lists of source files into elements that a reader opens; pages of tests are for those who look for files."""
    if app.env.docname.startswith("tests/"):
        return
    for table in list(tree.findall(nodes.table)):
        first_cells = [row[0].astext() for row in table.findall(nodes.row)]
        if len(first_cells) > 1 and all(map(_names_files, first_cells[1:])):
            place = table.parent.index(table)
            begin = nodes.raw("", "<details><summary>Source files</summary>", format="html")
            table.parent[place : place + 1] = [begin, table, nodes.raw("", "</details>", format="html")]


def _names_files(cell: str) -> bool:
    return all(_FILE.fullmatch(name) for name in re.split(r",\s*", cell))


def setup(app: Sphinx) -> None:
    write_pages()
    app.add_directive("names", Names)
    app.connect("source-read", as_page)
    app.connect("doctree-read", fold_source_files)
