"""Run files → what they say: numbers, findings, a page. Reads records; imports no torch.

`summary.py` makes the numbers of one run, `comparison.py` those of several beside each other,
`sparkline.py` draws a row of them in one line of text.
"""
