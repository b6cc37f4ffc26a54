"""Sphinx's configuration of the documentation site: the READMEs, the notebooks and the docstrings of the public names.

`make docs` builds it in `build/site`. The source folder is the repository's root, so that the links between documents
work on the site and in a checkout.
"""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[2]))

import pt2mx
from notebooks.site.names import defined_in, directive

project = "pt2mx"
root_doc = "notebooks/site/index"
include_patterns = ["*.md", "notebooks/**", "**/README.md", "tests/neighbours/results.md"]
# pt2mx/fx, pt2mx/pt2e and pt2mx/configs are links to the folders of the root
exclude_patterns = ["pt2mx/fx", "pt2mx/pt2e", "pt2mx/configs", "build", ".*", "**/*.py"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks hold their outputs
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings name shapes and dtypes

html_theme = "furo"
html_title = f"pt2mx {pt2mx.__version__}"
html_show_copyright = False
html_copy_source = False
html_extra_path = ["index.html"]  # the root of the site leads to its start page


class Names(SphinxDirective):
    """Document the public names that modules with one of the prefixes of the argument define."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        directives = map(directive, defined_in(self.arguments[0].split()))
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *directives, "```"]))


def setup(app: Sphinx) -> None:
    app.add_directive("names", Names)
