"""Every architecture of the sweep, each with a recipe."""

from tests.sweep import hugging_face, vision
from tests.sweep.architecture import Architecture

#: taken in turn, so that each kind of model meets each
_RECIPES = ("mxfp8", "mxfp4", "mxfp6", "mxint8")

#: name -> architecture
ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (*vision.ARCHITECTURES, *hugging_face.ARCHITECTURES)}

#: name -> recipe
RECIPES: dict[str, str] = {name: _RECIPES[i % len(_RECIPES)] for i, name in enumerate(ARCHITECTURES)}

#: those that are compiled too, one of each kind of graph: torch.compile takes a minute or more for each
COMPILED = ("alexnet", "vit", "ConvNextModel", "LlamaForCausalLM", "MambaForCausalLM")
