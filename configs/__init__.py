"""Recipes that pt2mx ships; `MXQuantizer.from_recipe(name)` reads them."""
