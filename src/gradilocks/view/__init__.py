"""Reads run files and shows them: report, watch and ls. Imports neither torch nor the rest of the package."""
