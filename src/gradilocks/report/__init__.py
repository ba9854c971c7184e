"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns of numbers, `findings.py` judges them by the rules in `rules/`,
`series.py` makes of them what a plot shows, `figures.py` the plots, `page.py` the HTML.
`document.py` puts everything a page needs around it. The record of an audit becomes pictures in
`audit_figures.py`, and a panel or a page of its own in `audit_page.py`.
`summary.py` makes the numbers of one run, `comparison.py` those of several beside each other.
"""
