"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns of numbers, `findings.py` judges them by the rules in `rules/`,
`series.py` makes of them what a plot shows, `figures.py` the plots, `page.py` the HTML.
`document.py` puts everything a page needs around it. The plain data of an audit pass `audited.py`,
and become a panel in `audit_panel.py` and a page in `audit.py`.
`summary.py` makes the numbers of one run, `comparison.py` those of several beside each other.
"""
