"""The page of a report: `page.py` fills `page.html` with the style, the scripts and the data of one report."""
