"""Views of run files: report, watch and ls. Imports neither torch nor the rest of the package."""
