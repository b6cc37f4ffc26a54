"""Replacements of functions of torch and transformers that last for one call. `README.md` lists them."""
