"""Choose a spec for each operand: configs, recipes and the annotation of graphs."""
