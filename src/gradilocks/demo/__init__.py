"""The demo: a small GPT trained in emulated fp16 under ``gradilocks.GradientControl``.

Settings enter, a Summary leaves, and nothing here prints: ``gradilocks.cli.demo`` does. The folder
reads in order: ``text`` (Python's own documentation, as batches) -> ``model`` (the GPT, built on
the fp16 layers of ``half``) -> ``train`` (the loop); they speak in ``values``.
"""
