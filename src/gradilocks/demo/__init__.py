"""The Goldilocks experiment: gradients too small, too large, and just right.

Arms and a Setup enter, Results and Verdicts leave, and nothing here prints: ``gradilocks.cli.demo``
does. The folder reads in order: ``arms`` (what is compared) and ``text`` (Python's own
documentation, as batches) -> ``model`` (a plain GPT) -> ``train`` (the loop, one arm and one seed)
-> ``worker`` and ``crew`` (two processes that share the arms out) -> ``verdicts`` (what the numbers
say about each claim) -> ``summary`` (all of it as JSON). They speak in ``values``.
"""
