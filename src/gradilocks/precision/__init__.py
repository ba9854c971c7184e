"""What number formats can hold: `formats.py` describes them and rounds to them, without torch."""

from gradilocks.precision.formats import FORMATS, Format, Stored, describe, format_named

__all__ = ["FORMATS", "Format", "Stored", "describe", "format_named"]
