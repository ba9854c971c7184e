"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns of numbers, `findings.py` judges them by the rules in `rules/`,
`series.py` makes of them what a plot shows, `figures.py` the plots, `page.py` the HTML.
`summary.py` makes the numbers of one run, `comparison.py` those of several beside each other.
"""
