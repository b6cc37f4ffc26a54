"""Which operands are quantized, and how: configs, recipes and the annotation of graphs."""
